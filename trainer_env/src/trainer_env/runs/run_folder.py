"""The folder of a run: whether this run may have it, that it has it alone, and what a full disk is called."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from bridge.endpoint import private_dir
from bridge.errors import BridgeError, ConfigError
from trainer_env.config import TrainConfig
from trainer_env.runs.checkpoints import checkpoint_to_resume, step_of
from trainer_env.runs.finding import taken, to_resume


def step_to_resume(config: TrainConfig, *, resume: bool) -> int | None:
    """The step of the checkpoint to go on from; None for a new run. Changes nothing.

    Raises ConfigError when a new run's folder holds one already, or one to be resumed has no checkpoint.
    """
    if not resume:
        metrics = config.run_dir / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size:
            raise taken(config.run_dir)
        return None
    return step_of(checkpoint_to_resume(config.run_dir / "checkpoints"))


class RunLock:
    """One trainer a run folder. The system lets go of it however this process ends. Raises ConfigError."""

    def __init__(self, config: TrainConfig) -> None:
        folder = private_dir(config.run_dir)
        self._lock = os.open(folder / "trainer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(
                f"Another tandem-train is at work in {folder}.",
                remedy="Wait until it has ended, or start another run with --run NAME.",
            ) from None

    def release(self) -> None:
        """Let another trainer in."""
        os.close(self._lock)


@contextmanager
def needing_room(config: TrainConfig) -> Iterator[None]:
    """Say plainly that the disk is full, whatever words a library has for it. Raises BridgeError."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        raise BridgeError(
            f"The disk of {config.run_dir} is full.",
            why=f"{type(error).__name__}: {error}",
            remedy=f"Make room, then go on from the last whole checkpoint with {to_resume(config.run_dir)}; what was "
            "written before is intact.",
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, means a full disk. Some libraries keep nothing but its text."""
    while error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
