"""Runs that are killed at moments which a seed decides. Nobody is killed but who descends from a run."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from bridge import guard
from bridge.endpoint import read_connection
from runs import PATIENCE_S, Lab, Run

LONG_S = 1800.0
"""For a real run to get somewhere."""


def kill_trainer(lab: Lab, run: Run, moments: tuple[int, ...], within_s: float) -> list[Run]:
    """Kill its trainer some time after each of these steps, and go on with it; the runs, the last of which ended."""
    rng = random.Random(f"trainer/{moments}")
    runs = [run]
    for step in moments:
        run.expected_to_live = True
        run.until(lambda run=run, step=step: taken(run) and run.steps[-1] >= step, f"step {step}", LONG_S)
        time.sleep(rng.uniform(0, within_s))
        run.process.kill()
        run.process.wait()
        run = lab.resume(run)
        runs.append(run)
    run.finish(LONG_S)
    for earlier in runs[:-1]:
        earlier.finish().gone().expected_to_live = False
    return runs


def kill_engine(run: Run, moments: tuple[int, ...], within_s: float) -> Run:
    """Kill a process of its engine some time after each of these steps; the run when it has ended."""
    rng = random.Random(f"engine/{moments}")
    for step in moments:
        run.until(lambda step=step: run.steps and run.steps[-1] >= step, f"step {step}", LONG_S)
        time.sleep(rng.uniform(0, within_s))
        victim = rng.choice(sorted(engine(run), key=memory)[-2:])  # The small ones are no part that it misses.
        with contextlib.suppress(ProcessLookupError):  # It has just ended by itself.
            os.kill(victim, signal.SIGKILL)
    return run.finish(LONG_S)


def taken(run: Run) -> bool:
    """Whether the command itself has taken a step, and not only an earlier one of the same run."""
    return any(line.startswith("step ") for line in run.stdout.splitlines())


def memory(pid: int) -> int:
    """Pages that a process holds."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return 0


def engine(run: Run) -> list[int]:
    """The engine's processes: what descends from the command, below its server and that one's guard."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        server = read_connection(run.run_dir / "connection.json").pid
        assert server in guard.descendants(run.process.pid)
        below = [(pid, guard.living(pid)) for pid in guard.descendants(server)]
        guards = [pid for pid, process in below if process and process.parent == server]
        if found := [pid for one in guards for pid in guard.descendants(one)]:
            return found
        time.sleep(0.05)
    pytest.fail(f"there is no engine\n{run.report()}")
