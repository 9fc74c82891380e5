"""Progress as people see it: a live table in a terminal, a line a step anywhere else."""

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_env.runs.records import Evaluation, Sample, StepMetrics, Summary

Mode = Literal["auto", "live", "plain", "none"]

_ROWS = 12
"""Steps that the live table shows."""

Column = tuple[str, Callable[[StepMetrics], str]]


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure for people; a dash when there is none."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m05s or 2h07m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


COLUMNS: tuple[Column, ...] = (
    ("reward", lambda m: number(m.reward_mean)),
    ("tokens/s", lambda m: number(m.generated_tokens_per_s, 0)),
    ("length", lambda m: number(m.completion_length, 1)),
    ("ratio", lambda m: number(m.ratio_mean, 3)),
    ("rollout", lambda m: number(m.rollout_s, 1, "s")),
    ("train", lambda m: number(m.train_s, 1, "s")),
    ("publish", lambda m: number(m.publish_ms, 0, "ms")),
)


class TimeLeft:
    """Seconds that the remaining steps will take: the median of the last eight, so that a slow first one fades."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total_steps, clock
        self._last = clock()
        self._taken: deque[float] = deque(maxlen=8)

    def start(self) -> None:
        """A step begins now: what came before it, such as an evaluation, is not part of it."""
        self._last = self._clock()

    def step(self, step: int) -> float:
        """Note that a step has ended; the seconds that are left."""
        now = self._clock()
        self._taken.append(now - self._last)
        self._last = now
        return statistics.median(self._taken) * max(0, self._total - step)


class Display(Protocol):
    """What the tracker tells. All calls come from one thread."""

    def status(self, text: str) -> None:
        """What the run is doing now."""
        ...

    def note(self, text: str) -> None:
        """What stays true for the rest of the run."""
        ...

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step has ended."""
        ...

    def evaluation(self, record: Evaluation) -> None:
        """An evaluation has ended."""
        ...

    def finish(self, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """The run has ended well."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def open_display(mode: Mode, total_steps: int, console: Console | None = None) -> Display:
    """The display for a mode; auto is a picture in a notebook, live in a terminal, and plain elsewhere."""
    # Bound to the stream of now: while the libraries run, sys.stdout is trainer.log.
    console = console or Console(file=sys.stdout, highlight=False, force_jupyter=False)
    if mode == "none":
        return Silent()
    if mode == "auto" and in_kernel():
        from trainer_env.display.notebook_view import NotebookView

        return NotebookView(total_steps)
    live = mode == "live" or (mode == "auto" and console.is_terminal)
    return LiveTable(total_steps, console) if live else PlainLines(total_steps, console)


class Silent:
    """Shows nothing."""

    def status(self, text: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def step(self, metrics: StepMetrics) -> None:
        """Nothing."""

    def evaluation(self, record: Evaluation) -> None:
        """Nothing."""

    def finish(self, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainLines:
    """One line a step, for logs and pipes."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total, self._console = total_steps, console
        self._left = TimeLeft(total_steps)

    def status(self, text: str) -> None:
        """One line."""
        self._print(text)
        self._left.start()

    def note(self, text: str) -> None:
        """One line."""
        self._print(text)

    def step(self, metrics: StepMetrics) -> None:
        """One line with the step's figures."""
        width = len(str(self._total))
        figures = "  ".join(f"{name} {value(metrics)}" for name, value in COLUMNS)
        left = duration(self._left.step(metrics.step))
        self._print(f"step {metrics.step:>{width}}/{self._total}  {figures}  left {left}")

    def evaluation(self, record: Evaluation) -> None:
        """One line with its mean reward."""
        self._print(evaluation_line(record))
        self._left.start()

    def finish(self, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """The closing words, and samples from before and after."""
        _print_ending(self._console, summary, run_dir, before, after)

    def close(self) -> None:
        """Nothing to give back."""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


class LiveTable:
    """A table of the last steps and a progress bar, redrawn in place. Other output scrolls above it."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total, self._console = total_steps, console
        self._left, self._started = TimeLeft(total_steps), time.monotonic()
        self._seconds_left: float | None = None
        self._steps: deque[StepMetrics] = deque(maxlen=_ROWS)
        self._status = ""
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)
        self._live.start()

    def status(self, text: str) -> None:
        """Shown under the table until something else is."""
        self._status = text
        self._left.start()

    def note(self, text: str) -> None:
        """A line above the table, which stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def step(self, metrics: StepMetrics) -> None:
        """A new row."""
        self._steps.append(metrics)
        self._seconds_left = self._left.step(metrics.step)
        self._status = ""

    def evaluation(self, record: Evaluation) -> None:
        """A line above the table."""
        self._console.print(evaluation_line(record), markup=False)
        self._left.start()

    def finish(self, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """The closing words, and samples from before and after, below the table."""
        self.close()
        _print_ending(self._console, summary, run_dir, before, after)

    def close(self) -> None:
        """Draw a last time and let the cursor go."""
        self._live.stop()

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("step", justify="right")
        for name, _ in COLUMNS:
            table.add_column(name, justify="right", style="bold green" if name == "reward" else "")
        for metrics in self._steps:
            table.add_row(f"{metrics.step}/{self._total}", *(value(metrics) for _, value in COLUMNS))
        elapsed = duration(time.monotonic() - self._started)
        left = "-" if self._seconds_left is None else duration(self._seconds_left)
        done = self._steps[-1].step if self._steps else 0
        foot = Table.grid(padding=(0, 2))
        foot.add_row(ProgressBar(total=self._total, completed=done, width=32), f"{elapsed} passed", f"{left} left")
        parts: list[RenderableType] = [table] if self._steps else []
        return Group(*parts, foot, Text(self._status, style="dim"))


def pairs(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The samples of the same prompts before and after training; first those that changed most."""
    earlier, later = _first_answers(before), _first_answers(after)
    found = [(earlier[prompt], sample) for prompt, sample in later.items() if prompt in earlier]
    return sorted(found, key=lambda pair: pair[0].reward - pair[1].reward)


def comparison(before: Sequence[Sample], after: Sequence[Sample], count: int = 6) -> Table:
    """The same prompts answered before and after training, side by side; first those that changed most."""
    table = Table(title="held-out examples", title_justify="left", header_style="dim")
    for name in ("prompt", "before", "reward", "after", "reward"):
        table.add_column(name, justify="right" if name == "reward" else "left", max_width=44)
    for first, last in pairs(before, after)[:count]:
        table.add_row(
            Text(short(first.prompt)),
            Text(short(first.completion)),
            number(first.reward),
            Text(short(last.completion)),
            number(last.reward),
        )
    return table


def _first_answers(samples: Sequence[Sample]) -> dict[str, Sample]:
    """By prompt, in their order."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.prompt, sample)
    return first


def short(text: str, limit: int = 110) -> str:
    """A text on one line, its middle left out where it is long: how it ends often matters most."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit // 2]} … {line[-limit // 2 :]}"


def evaluation_line(record: Evaluation) -> str:
    """An evaluation in a line."""
    when = {"eval_before": "before training", "eval_after": "after training"}.get(record.phase, f"step {record.step}")
    line = f"evaluation {when}: reward {record.reward_mean:.2f} on {record.examples} held-out examples"
    if record.num_generations == 1:
        return line
    chances = ", ".join(f"pass@{k} {chance:.2f}" for k, chance in record.pass_at.items())
    return f"{line} x {record.num_generations} answers, {chances}"


def ending(summary: Summary, run_dir: Path) -> list[tuple[str, str]]:
    """What a run came to and where it lies: names and texts."""
    best = f"{number(summary.best_reward)} at step {summary.best_step}, kept in {run_dir / 'best'}"
    early = f"early, after step {summary.steps}: the held-out examples' reward got no better"
    disagree = summary.proof.get("disagrees", 0)
    proof = f"trainer and server did not compute the same policy in {disagree} of {sum(summary.proof.values())} steps"
    return [
        ("reward", f"{number(summary.reward_first4)} (first 4 steps) → {number(summary.reward_last4)} (last 4 steps)"),
        ("held out", f"{number(summary.eval_before)} → {number(summary.eval_after)}"),
        *([] if summary.best_step is None else [("best", best)]),
        *([("ended", early)] if summary.stopped_early else []),
        *([("proof", proof)] if disagree else []),
        ("time", f"{duration(summary.wall_s)} for {summary.steps} steps on {summary.backend}, {summary.placement}"),
        *([] if summary.reward_first4 is None else [("plot", str(run_dir / "reward.png"))]),
        ("adapter", summary.adapter or "none was made"),
    ]


def in_kernel() -> bool:
    """Whether this is a notebook's process."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def _print_ending(
    console: Console, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]
) -> None:
    if before and after:
        console.print(comparison(before, after))
    for name, text in ending(summary, run_dir):
        console.print(f"{name:<9}{text}", markup=False, soft_wrap=True)
