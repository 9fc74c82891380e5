"""A private folder for one server: sockets (whose paths must be short) and adapters. Gone when the server is."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from bridge.endpoint import private_dir

MEMORY = Path("/dev/shm")  # noqa: S108 (the folder made in it is 0700 and checked)
ENOUGH_BYTES = 1 << 30
"""Containers often have 64 MiB there: too little for adapters."""

SPOOL = "spool"
"""The adapters' folder, in a server's own or in its run directory."""


class Scratch:
    """`tandem-<uid>-<server uuid>` on tmpfs, 0700. What servers of this user left behind by dying is swept first."""

    def __init__(self, server_uuid: str) -> None:
        parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        self._name = server_uuid[:12]
        self.path = parent / f"{_mine()}{self._name}"
        sweep(parent)
        self._locks = [_locked(self.path / "lock")]

    def spool(self, configured: str, run_dir: Path) -> Path:
        """Where adapters go: a folder in the configured one, else here when there is room, else the run directory.

        What dead servers left in the configured one is swept; the run directory's is `ownership.own`'s to remove.
        """
        if configured:
            here = f"{os.uname().nodename}-"
            sweep(Path(configured), here)
            folder = Path(configured) / f"{_mine()}{here}{self._name}"
            self._locks.append(_locked(folder / "lock"))
            return folder
        room = shutil.disk_usage(self.path).free
        return private_dir((self.path if room >= ENOUGH_BYTES else run_dir) / SPOOL)

    def remove(self) -> None:
        """Delete it all, but for a spool elsewhere."""
        shutil.rmtree(self.path, ignore_errors=True)
        for lock in self._locks:
            os.close(lock)


def _mine() -> str:
    """How the names of this user's folders begin."""
    return f"tandem-{os.getuid()}-"


def _locked(path: Path) -> int:
    """A lock file that is held. Another server's sweep may delete it between its making and its locking."""
    while True:
        private_dir(path.parent)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue
        with contextlib.suppress(OSError):  # A file system without locks: nobody can sweep there either.
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
        os.close(lock)


def sweep(parent: Path, here: str = "") -> None:
    """Delete the folders of servers that died without doing so: those whose lock nobody holds.

    here: how the names go on of those that may be taken. In a folder that several hosts share these are a host's own,
    for not every network file system shows it the others' locks.
    """
    for folder in parent.glob(f"{_mine()}{here}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            # Without a lock file its server died before it made one, or is about to: see `_locked`.
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
