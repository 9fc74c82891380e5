"""Run a program with its output in a log, within a time limit, and ended when we are."""

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from environments.errors import Interrupted, SetupError

_running: set[subprocess.Popen[bytes]] = set()
# Reentrant, for the signal handler runs in a thread that may hold it.
_guard = threading.RLock()
stopping = threading.Event()

# Settings of the caller's own Python that would lead a child into another environment.
_FOREIGN = (
    "CONDA_PREFIX",
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "UV_PREFIX",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_TARGET",
    "VIRTUAL_ENV",
)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return our environment variables without the ones that name another Python, plus `extra`."""
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN} | dict(extra or {})


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    keep_open: int | None = None,
) -> int:
    """Run a program, add its output to `log`, and return its exit status.

    `keep_open` is a file descriptor that the child inherits: a lock on it then lasts as long as the child, even
    if this process is killed.

    Raises:
        SetupError: the program cannot be started or takes longer than `timeout_s` seconds (it is then killed).
        Interrupted: a signal asked this process to stop.
    """
    words = [str(word) for word in command]
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(words)}\n".encode())
        output.flush()
        child = _start(words, output, env, cwd, keep_open)
    try:
        status = child.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise SetupError(
            f"{Path(words[0]).name} was stopped",
            why=f"it took longer than {timeout_s:.0f} s",
            remedy="read the log; on a slow network run the command again, it goes on from its cache",
            log=log,
        ) from None
    finally:
        with _guard:
            _running.discard(child)
    check_stopping()
    return status


def _start(
    words: list[str], output: IO[bytes], env: Mapping[str, str] | None, cwd: Path | None, keep_open: int | None
) -> subprocess.Popen[bytes]:
    check_stopping()
    with _guard:
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env) if env is not None else clean_environment(),
                cwd=cwd,
                pass_fds=() if keep_open is None else (keep_open,),
            )
        except OSError as error:
            raise SetupError(
                f"cannot start {words[0]}", why=str(error), remedy="check that the file exists and can be run"
            ) from error
        _running.add(child)
    if stopping.is_set():  # a signal came meanwhile, and did not find this child
        child.terminate()
    return child


def check_stopping() -> None:
    """Leave off work once a signal has asked for that.

    Raises:
        Interrupted: it has.
    """
    if stopping.is_set():
        raise Interrupted


def stop_on_signals() -> None:
    """On Ctrl-C or SIGTERM end the running children and start no more.

    No exception is raised at the point of the signal: whoever waits for a child or a lock gets `Interrupted`. A
    SIGINT that is ignored, as in a background job, stays so.
    """
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    del number, frame
    stopping.set()
    with _guard:
        for child in list(_running):
            child.terminate()


def tail(log: Path, lines: int = 12) -> list[str]:
    """The last non-empty lines of a log."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in text if line.strip()][-lines:]
