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
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
"""For the others to end once one has: it may take its server down, or wait in vain for the one that is gone."""


def launch(config: TrainConfig, placement: Placement, *, resume: bool) -> int:
    """Train in placement.ranks processes; the exit status of the run.

    The first one has the terminal, the others write to run_dir/ranks. Ctrl-C and SIGTERM mean what they mean to one
    process. Raises ConfigError as a Session would, and PeerDied when a process was killed.
    """
    step_to_resume(config, resume=resume)
    folder = private_dir(private_dir(config.run_dir) / "ranks")
    write_atomically(folder / "config.toml", to_toml(config).encode())
    write_atomically(folder / "placement.json", placement.to_json())
    meeting = folder / f"meeting-{os.getpid()}"
    meeting.unlink(missing_ok=True)
    words = [str(folder), str(os.getpid()), *(["--resume"] if resume else [])]
    processes = [_start(rank, placement.ranks, meeting, words) for rank in range(placement.ranks)]
    try:
        with _interrupts_passed_on_to(processes):
            return _outcome(processes, folder)
    finally:
        _end(processes)
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


@contextlib.contextmanager
def _interrupts_passed_on_to(processes: list[Process]) -> Iterator[None]:
    def pass_on(_signum: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _end(processes: list[Process]) -> None:
    """Ask, wait, and kill whoever still lives, with its family."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GOODBYE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
