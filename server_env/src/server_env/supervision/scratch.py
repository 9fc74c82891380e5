"""A private folder for one server: sockets (whose paths must be short) and adapters. Gone when the server is."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from bridge.endpoint import private_dir

MEMORY = Path("/dev/shm")  # noqa: S108 (the folder made in it is 0700 and checked)
ENOUGH_BYTES = 1 << 30
"""Containers often have 64 MiB there: too little for adapters."""


class Scratch:
    """`tandem-<uid>-<server uuid>` on tmpfs, 0700. What servers of this user left behind by dying is swept first."""

    def __init__(self, server_uuid: str) -> None:
        parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        sweep(parent)
        self.path = private_dir(parent / f"tandem-{os.getuid()}-{server_uuid[:12]}")
        self._lock = _locked(self.path / "lock")

    def spool(self, configured: str, run_dir: Path) -> Path:
        """Where adapters go: the configured folder, else here when there is room, else the run directory."""
        if configured:
            return private_dir(Path(configured) / self.path.name)
        room = shutil.disk_usage(self.path).free
        return private_dir((self.path if room >= ENOUGH_BYTES else run_dir) / "spool")

    def remove(self) -> None:
        """Delete it all."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(path: Path) -> int:
    """A lock file that is held. Another server's sweep may delete it between its making and its locking."""
    while True:
        private_dir(path.parent)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_ino == os.fstat(lock).st_ino:
            return lock
        os.close(lock)


def sweep(parent: Path) -> None:
    """Delete the folders of servers that died without doing so: those whose lock nobody holds."""
    for folder in parent.glob(f"tandem-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
