"""Several trainer processes, one a GPU: started together, watched, and ended together.

They know their places by the variables that torchrun sets. Torchrun itself would give an interrupted run a fixed time
for the optimizer step that it is taking, and leave a run with a dead process hanging for as long.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

from bridge.endpoint import private_dir
from bridge.errors import PeerDied
from trainer_env.config import TrainConfig, to_toml
from trainer_env.placement import Placement
from trainer_env.ranks import MEETING
from trainer_env.runs.jsonl import write_atomically
from trainer_env.runs.run_folder import step_to_resume

Process = subprocess.Popen[bytes]

POLL_S = 0.1
LAST_WORDS = 3000
"""Characters that are shown of a failed process's output."""
GOODBYE_S = 20.0
"""For the others to end once one has: it may take its server down, or wait in vain for the one that is gone. Another
Ctrl-C ends the wait."""


def launch(config: TrainConfig, placement: Placement, *, resume: bool) -> int:
    """Train in placement.ranks processes; the exit status of the run.

    The first one has the terminal, the others write to run_dir/ranks. Ctrl-C and SIGTERM mean what they mean to one
    process; once one has ended, that the others are killed. Raises ConfigError as a Session would, and PeerDied when a
    process was killed.
    """
    step_to_resume(config, resume=resume)
    folder = private_dir(private_dir(config.run_dir) / "ranks")
    write_atomically(folder / "config.toml", to_toml(config).encode())
    write_atomically(folder / "placement.json", placement.to_json())
    meeting = folder / f"meeting-{os.getpid()}"
    meeting.unlink(missing_ok=True)
    words = [str(folder), str(os.getpid()), *(["--resume"] if resume else [])]
    with _Interrupts() as interrupts:
        processes = interrupts.passed_on_to
        try:
            for rank in range(placement.ranks):
                processes.append(_start(rank, placement.ranks, meeting, words))
            if interrupts.count:  # Whoever was being started has not heard of it.
                raise KeyboardInterrupt
            return _outcome(processes, folder)
        finally:
            _end(processes, interrupts)
            meeting.unlink(missing_ok=True)


def log_of(rank: int, folder: Path) -> Path:
    """Where a process's output goes."""
    return folder.parent / "trainer.log" if rank == 0 else folder / f"{rank}.log"


def _start(rank: int, ranks: int, meeting: Path, words: list[str]) -> Process:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        MEETING: meeting.absolute(),
        # One host: nothing of it has to be reached from another one.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "trainer_env.ranks.one_rank", *words]
    if rank == 0:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with log_of(rank, meeting.parent).open("wb") as log:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


class _Interrupts:
    """In here Ctrl-C and SIGTERM raise nothing: they are passed on as SIGINT to these processes, and counted."""

    def __init__(self) -> None:
        self.passed_on_to: list[Process] = []
        self.count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _pass_on(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1
        for process in self.passed_on_to:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)


def _outcome(processes: list[Process], folder: Path) -> int:
    """Wait until the first process has ended, or any has failed; the exit status of the run."""
    while processes[0].poll() is None and not any(process.poll() for process in processes):
        time.sleep(POLL_S)
    failed = next((rank for rank, process in enumerate(processes) if process.returncode), 0)
    status = processes[failed].poll() or 0
    if status < 0:
        raise PeerDied(
            f"Trainer process {failed} of {len(processes)} was killed by {signal.Signals(-status).name}, "
            "and the run ends with it.",
            why="The processes train one model together.",
            log_path=str(log_of(failed, folder)),
            remedy="--resume goes on from the last checkpoint; grpo.save_steps says how often one is written.",
        )
    if failed:
        print(log_of(failed, folder).read_text(encoding="utf-8", errors="replace")[-LAST_WORDS:], file=sys.stderr)
        print(f"tandem-train: trainer process {failed} of {len(processes)} has failed.", file=sys.stderr)
    return status


def _end(processes: list[Process], interrupts: _Interrupts) -> None:
    """Ask, wait until GOODBYE_S are over or somebody interrupts, and kill whoever still lives, with its family."""
    before, deadline = interrupts.count, time.monotonic() + GOODBYE_S
    for process in _living(processes):
        process.terminate()
    while _living(processes) and interrupts.count == before and time.monotonic() < deadline:
        time.sleep(POLL_S)
    left = _living(processes)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in left:
        process.wait()


def _living(processes: list[Process]) -> list[Process]:
    return [process for process in processes if process.poll() is None]
