"""Run a program with its output in a log, within a time limit, and ended when we are."""

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from environments.errors import SetupError

_running: set[subprocess.Popen[bytes]] = set()
_guard = threading.Lock()
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
    """
    words = [str(word) for word in command]
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(words)}\n".encode())
        output.flush()
        child = _start(words, output, env, cwd, keep_open)
    try:
        return child.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise SetupError(
            f"{Path(words[0]).name} was stopped",
            why=f"it took longer than {timeout_s:.0f} s",
            remedy="read the log; on a slow network run the command again, it goes on from its cache",
            log=log,
        ) from None
    except KeyboardInterrupt:
        child.terminate()
        raise
    finally:
        with _guard:
            _running.discard(child)


def _start(
    words: list[str], output: IO[bytes], env: Mapping[str, str] | None, cwd: Path | None, keep_open: int | None
) -> subprocess.Popen[bytes]:
    with _guard:  # so that `end_children` misses none
        check_stopping()
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
    return child


def check_stopping() -> None:
    """Leave the work of a thread once `end_children` was called.

    Raises:
        SetupError: it was.
    """
    if stopping.is_set():
        raise SetupError("interrupted", why="this script was asked to stop", remedy="run the command again to go on")


def end_children() -> None:
    """Ask every program that `run` waits for to end, and start no more (used when this process is interrupted)."""
    stopping.set()
    with _guard:
        for child in _running:
            child.terminate()


def tail(log: Path, lines: int = 12) -> list[str]:
    """The last non-empty lines of a log."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in text if line.strip()][-lines:]
