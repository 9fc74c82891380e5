"""One tandem-server a run directory."""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from bridge.errors import ConfigError
from server_env.supervision.scratch import SPOOL

TRIES, PAUSE_S = 6, 0.01


def own(run_dir: Path, stack: contextlib.AsyncExitStack) -> None:
    """Hold this run directory until the stack is left. Removes what one that was killed left.

    Raises ConfigError while another one lives.
    """
    lock = os.open(run_dir / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    if not _taken(lock):
        raise ConfigError(
            f"Another tandem-server already serves {run_dir}.", remedy="Use another run name, or end that server first."
        )
    (run_dir / "connection.json").unlink(missing_ok=True)
    shutil.rmtree(run_dir / SPOOL, ignore_errors=True)  # Its adapters have the names that ours will have.


def _taken(lock: int) -> bool:
    """Take a lock unless somebody keeps it. Who only looks whether a server holds it has it for a moment, too."""
    for tries_left in reversed(range(TRIES)):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if tries_left:
                time.sleep(PAUSE_S)
        else:
            return True
    return False
