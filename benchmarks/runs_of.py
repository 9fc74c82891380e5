"""Run a trainer as a process, watch it, and say what its steps, its start and its memory came to.

Tandem and its peers alike write a line a step into a metrics.jsonl, with the names of trainer_env/runs/records.py.
"""

import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import psutil

from gpu_use import Families, GpuUse, family
from job import Job

POLL_S = 0.01
END_S = 90.0
KILL_S = 20.0
TAIL_LINES = 25

AVERAGED = (
    "rollout_s",
    "train_s",
    "publish_ms",
    "load_ms",
    "proof_ms",
    "sleep_s",
    "wake_s",
    "freed_bytes",
    "overlap",
    "staleness",
    "ratio_mean",
    "dlogp_mean_abs",
    "completion_length",
    "generated_tokens",
)
"""Of a step's figures, those whose median is reported."""

READY = {"trainer_ready_s": "the trainer's model is loaded", "server_ready_s": "the server answers"}
"""What tandem-train and the peers' scripts print, and what the moment of each is called."""


@dataclass
class Run:
    """One process from start to end. ended: when each step's line was there, in seconds from the start."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    ready: dict[str, float] = field(default_factory=dict)
    """Moments of the start, in seconds from it."""
    memory: dict[str, int] = field(default_factory=dict)
    """Peak bytes of GPU memory of each half, where the driver tells them."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Peak bytes in use on each GPU."""
    problem: str = ""
    """Why it did not end well, with its last lines."""

    def start(self) -> dict[str, float]:
        """Seconds from the process's start: when the first step began, how long it took, and what was ready when."""
        if not self.steps:
            return dict(self.ready)
        first = accounted(self.steps[0])
        return self.ready | {"first_step_began_s": self.ended[0] - first, "first_step_s": first}

    def figures(self, warm_up: int) -> dict[str, float | None]:
        """Medians over the steps after the first warm_up ones. step_s: from one step's end to the next one's."""
        seconds = [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)][warm_up - 1 :]
        steps = self.steps[warm_up:]
        found: dict[str, float | None] = {"counted": len(steps), "step_s": median(seconds)}
        found["step_s_worst"] = max(seconds, default=None)
        found |= {name: median([step.get(name) for step in steps]) for name in AVERAGED}
        whole = sum(seconds)
        tokens = sum(step.get("generated_tokens") or 0 for step in steps)
        found["tokens_per_s"] = tokens / whole if whole else None
        found["sampled_tokens_per_s"] = median([step.get("generated_tokens_per_s") for step in steps])
        return found

    def proofs(self) -> dict[str, int]:
        """Steps by the verdict of the proof of sync."""
        verdicts = [step["proof"] for step in self.steps if step.get("proof")]
        return {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}


def accounted(step: Mapping[str, Any]) -> float:
    """Seconds of a step by its own figures."""
    parts = [step.get(name) or 0.0 for name in ("rollout_s", "train_s", "sleep_s", "wake_s")]
    return sum(parts) + (step.get("publish_ms") or 0.0) / 1000


def median(values: Sequence[float | None]) -> float | None:
    """Of those that apply; None if none does."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


class Child:
    """A process whose lines are kept, each with its moment; ended when the block is left.

    It leads a session of its own: a Ctrl-C is ours to pass on.
    """

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: str) -> None:
        self.lines: list[tuple[float, str]] = []
        """(seconds from the start, line)"""
        self.command = list(command)
        folder.mkdir(parents=True, exist_ok=True)
        self._log = (folder / log).open("w", encoding="utf-8")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask it to end, then make it, and whoever of its helpers is left."""
        helpers = []
        with contextlib.suppress(psutil.Error):
            helpers = psutil.Process(self.process.pid).children(recursive=True)
        for signum, seconds in ((signal.SIGTERM, END_S), (signal.SIGKILL, KILL_S)):
            if self.process.poll() is None:
                self.process.send_signal(signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(seconds)
        for helper in psutil.wait_procs(helpers, timeout=5)[1]:
            with contextlib.suppress(psutil.Error):
                helper.kill()
        self._reader.join(5)
        self._log.close()

    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(line for _, line in self.lines[-TAIL_LINES:])

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip()))
            with contextlib.suppress(ValueError):  # Closed: it outlived its end.
                self._log.write(line)
                self._log.flush()


class Metrics:
    """A metrics.jsonl that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines that came since this was last asked."""
        if not self._path.exists() or self._path.stat().st_size <= self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._read += len(content)
        return [json.loads(line) for line in content.splitlines()]


def watch(
    name: str, child: Child, metrics: Path, families: Families, *, timeout_s: float, beside: Sequence[Child] = ()
) -> Run:
    """Follow a process to its end. beside: others that must live as long."""
    run, lines = Run(name), Metrics(metrics)
    with GpuUse(families) as use:
        while child.process.poll() is None and not run.problem:
            _note(run, lines, child)
            if time.monotonic() - child.started > timeout_s:
                run.problem = f"not at its end after {timeout_s:g} s\n{child.tail()}"
            dead = next((other for other in beside if other.process.poll() is not None), None)
            if dead:
                run.problem = f"{shlex.join(dead.command)} ended\n{dead.tail()}"
            time.sleep(POLL_S)
    _note(run, lines, child)
    if child.process.poll():
        run.problem = f"exit code {child.process.returncode}\n{child.tail()}"
    elif not run.steps and not run.problem:
        run.problem = f"it ended without a step\n{child.tail()}"
    run.ready = {
        label: next((moment for moment, line in child.lines if text in line), 0.0) for label, text in READY.items()
    }
    run.ready = {label: moment for label, moment in run.ready.items() if moment}
    run.memory, run.gpus = use.halves, use.gpus
    return run


def _note(run: Run, lines: Metrics, child: Child) -> None:
    new = lines.new()
    run.steps += new
    run.ended += [time.monotonic() - child.started] * len(new)


def tandem(
    name: str, job: Job, options: Namespace, folder: Path, *, arguments: Sequence[str], environment: Mapping[str, str]
) -> Run:
    """Run tandem-train once. arguments: what makes this variant."""
    folder.mkdir(parents=True, exist_ok=True)
    config = job.write_config(folder, job.write_prompts(folder), options.backend)
    command = [str(options.venvs.resolve() / "trainer" / "bin" / "tandem-train"), "--config", str(config)]
    command += ["--run", name, *arguments]
    for setting in options.set:
        command += ["--set", setting]
    with Child(command, folder, environment, f"{name}.log") as child:
        metrics = folder / "runs" / name / "metrics.jsonl"
        pid = child.process.pid
        return watch(name, child, metrics, lambda: _halves(pid), timeout_s=options.timeout_s)


def _halves(trainer: int) -> dict[str, set[int]]:
    """The processes of each half of a tandem-train."""
    everybody, server = family(trainer), set[int]()
    for pid in everybody:
        with contextlib.suppress(psutil.Error):
            if any(Path(word).name == "tandem-server" for word in psutil.Process(pid).cmdline()[:3]):
                server |= family(pid)
    return {"trainer": everybody - server, "server": server}


def caches(folder: Path) -> dict[str, str]:
    """Variables that have everything compiled into a folder, and found there again."""
    names = {"TANDEM_CACHE": "tandem", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    names |= {"VLLM_CACHE_ROOT": "vllm", "UNSLOTH_COMPILE_LOCATION": "unsloth_compiled_cache"}
    models = Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem") / "models"
    (folder / "tandem").mkdir(parents=True)
    if models.is_dir():  # Making a builtin model is no part of a start.
        (folder / "tandem" / "models").symlink_to(models.resolve())
    return {name: str(folder / part) for name, part in names.items()}


def shorter(job: Job, steps: int) -> Job:
    """The same job for fewer steps."""
    return replace(job, steps=steps)


def end_on_sigterm() -> None:
    """Whoever ends a benchmark ends what it runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
