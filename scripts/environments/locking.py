"""One builder at a time, across processes, without stale locks."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments.console import say
from environments.errors import SetupError
from environments.processes import check_stopping, stopping

_POLL_S = 0.1


@contextmanager
def hold(path: Path, *, timeout_s: float) -> Iterator[int]:
    """Hold an exclusive lock on `path` and yield its file descriptor.

    The kernel drops the lock when the last process that has the descriptor ends, however it ends.

    Raises:
        SetupError: another process still holds it after `timeout_s` seconds, or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SetupError(
            f"cannot write to {path.parent}",
            why=error.strerror or str(error),
            remedy="make it writable, or choose another place with TANDEM_VENVS",
        ) from None
    try:
        _acquire(descriptor, path, timeout_s)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    announced = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            if time.monotonic() > deadline:
                raise SetupError(
                    f"{path.stem} is being built by another process",
                    why=f"process {holder} or a child of it still holds {path} after {timeout_s:.0f} s",
                    remedy="wait for it or end it, then run this again",
                ) from None
            if not announced:
                say(f"{path.stem}: waiting for process {holder}, which is building it")
                announced = True
            stopping.wait(_POLL_S)
            check_stopping()
        else:
            return
