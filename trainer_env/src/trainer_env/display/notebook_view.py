"""A run's progress in a notebook's cell: one output that is drawn again at each step, and stays in the saved file."""

import time
from collections import deque
from collections.abc import Sequence
from html import escape
from pathlib import Path

from IPython.display import HTML, DisplayHandle, display

from trainer_env.display import COLUMNS, TimeLeft, duration, ending, evaluation_line, number, pairs, short
from trainer_env.display.chart import Curve, chart
from trainer_env.display.plot import moving_mean
from trainer_env.runs.records import Evaluation, Sample, StepMetrics, Summary

ROWS = 5
"""Steps that the table shows."""
MEAN_OF = 4
_STEP, _MEAN, _HELD_OUT = "#9db8d9", "#1f5fa8", "#d9772b"
_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;margin:4px 0"


class NotebookView:
    """A `Display` for a cell: the reward curve, the last steps, what is being done. After the end: samples as well."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._left, self._started = TimeLeft(total_steps), time.monotonic()
        self._seconds_left: float | None = None
        self._steps: list[StepMetrics] = []
        self._evaluations: list[Evaluation] = []
        self._notes: list[str] = []
        self._evaluated: deque[str] = deque(maxlen=4)
        self._status = ""
        self._end = ""
        self._handle: DisplayHandle | None = display(HTML(self._drawn()), display_id=True)

    def status(self, text: str) -> None:
        """Shown under the table until something else is."""
        self._status = text
        self._left.start()
        self._draw()

    def note(self, text: str) -> None:
        """A line that stays."""
        self._notes.append(text)
        self._draw()

    def step(self, metrics: StepMetrics) -> None:
        """A new point."""
        self._steps.append(metrics)
        self._seconds_left = self._left.step(metrics.step)
        self._status = ""
        self._draw()

    def evaluation(self, record: Evaluation) -> None:
        """A point of its own."""
        self._evaluations.append(record)
        self._evaluated.append(evaluation_line(record))
        self._left.start()
        self._draw()

    def finish(self, summary: Summary, run_dir: Path, before: Sequence[Sample], after: Sequence[Sample]) -> None:
        """What came of it, and samples from before and after."""
        self._seconds_left, self._status = None, ""
        rows = "".join(_row([name, text]) for name, text in ending(summary, run_dir))
        self._end = f'{comparison(before, after)}<table style="{_TABLE}">{rows}</table>'
        self._draw()

    def close(self) -> None:
        """Nothing to give back: the last picture stays."""

    def _draw(self) -> None:
        if self._handle:
            self._handle.update(HTML(self._drawn()))

    def _drawn(self) -> str:
        done = self._steps[-1].step if self._steps else 0
        left = "" if self._seconds_left is None else f", {duration(self._seconds_left)} left"
        foot = f"step {done} of {self._total}, {duration(time.monotonic() - self._started)} passed{left}"
        parts = [drawn(self._steps, self._evaluations, self._total) if self._steps else "", steps_table(self._steps)]
        lines = (*self._notes, *self._evaluated, foot, self._status)
        parts += [f"<div>{escape(line)}</div>" for line in lines if line]
        return "".join([*parts, self._end])


def drawn(steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], total: int = 0) -> str:
    """The reward of each step, its mean over the last few, and the held-out examples, as an SVG element."""
    points = [(metrics.step, metrics.reward_mean) for metrics in steps if metrics.reward_mean is not None]
    mean = moving_mean([reward for _, reward in points], MEAN_OF)
    curves = [
        Curve("each step", points, _STEP, dots=True),
        Curve(f"mean of {MEAN_OF} steps", [(step, y) for (step, _), y in zip(points, mean, strict=True)], _MEAN),
    ]
    if evaluations:
        held_out = [(record.step, record.reward_mean) for record in evaluations]
        curves.append(Curve("held out", held_out, _HELD_OUT, dots=True))
    return chart(curves, title="reward by step", last_x=total)


def steps_table(steps: Sequence[StepMetrics]) -> str:
    """The last steps' figures."""
    if not steps:
        return ""
    rows = [_row([str(metrics.step), *(value(metrics) for _, value in COLUMNS)]) for metrics in steps[-ROWS:]]
    return f'<table style="{_TABLE}">{_row(["step", *(name for name, _ in COLUMNS)], "th")}{"".join(rows)}</table>'


def comparison(before: Sequence[Sample], after: Sequence[Sample], count: int = 6) -> str:
    """The same prompts answered before and after training, those that changed most first."""
    found = pairs(before, after)[:count]
    rows = [
        _row(
            [
                short(first.prompt),
                short(first.completion),
                number(first.reward),
                short(last.completion),
                number(last.reward),
            ]
        )
        for first, last in found
    ]
    if not rows:
        return ""
    head = _row(["prompt", "before", "reward", "after", "reward"], "th")
    return f'<table style="{_TABLE}">{head}{"".join(rows)}</table>'


def _row(cells: Sequence[str], tag: str = "td") -> str:
    """Samples are a model's words: never markup."""
    begin = f'<{tag} style="padding:1px 10px 1px 0;text-align:left">'
    return f"<tr>{''.join(f'{begin}{escape(cell)}</{tag}>' for cell in cells)}</tr>"
