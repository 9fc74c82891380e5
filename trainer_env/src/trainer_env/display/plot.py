"""The reward curve of a run as a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer_env.runs.records import Evaluation, StepMetrics

_DOT, _LINE, _HELD_OUT, _INK, _GRID = "#9db8d9", "#1f5fa8", "#d9772b", "#333333", "#e6e6e6"


def plot_rewards(path: Path, steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation], window: int = 4) -> None:
    """Write a PNG: the reward of each step, its mean over the last `window` steps, and the held-out evaluations."""
    points = [(metrics.step, metrics.reward_mean) for metrics in steps if metrics.reward_mean is not None]
    numbers, rewards = [step for step, _ in points], [reward for _, reward in points]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(numbers, rewards, "o", color=_DOT, markersize=4.5, label="each step")
    axes.plot(numbers, moving_mean(rewards, window), color=_LINE, linewidth=2.2, label=f"mean of {window} steps")
    if evaluations:
        held_out = sorted(evaluations, key=lambda record: record.step)
        axes.plot(
            [record.step for record in held_out],
            [record.reward_mean for record in held_out],
            "D--",
            color=_HELD_OUT,
            linewidth=1,
            markersize=7,
            label="held-out examples",
        )
        for record in held_out:
            axes.annotate(
                f"{record.reward_mean:.2f}",
                (record.step, record.reward_mean),
                textcoords="offset points",
                xytext=(0, 9),
                ha="center",
                color=_HELD_OUT,
            )
    axes.set_xlabel("optimizer step", color=_INK)
    axes.set_ylabel("mean reward", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(y=0.12)
    axes.grid(visible=True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value the mean of it and up to window - 1 values before it."""
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
