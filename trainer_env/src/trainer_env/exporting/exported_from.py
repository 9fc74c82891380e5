"""Which adapter of a run is meant, and what is known of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from bridge.errors import ConfigError
from trainer_env.evaluation import best_adapter
from trainer_env.runs.records import Evaluation, StepMetrics
from trainer_env.runs.run_reader import final_step, summary_of

T = TypeVar("T", bound=msgspec.Struct)

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class Origin(msgspec.Struct, frozen=True):
    """An adapter of a run. step: optimizer steps taken. reward: mean of that step's completions; held_out: of an
    evaluation after it. Each is None where it is not known.
    """

    run: str
    folder: Path
    step: int | None = None
    reward: float | None = None
    held_out: float | None = None

    def describe(self) -> str:
        """In words, for people."""
        step = "" if self.step is None else f" after step {self.step}"
        known = [("reward", self.reward), ("on held-out examples", self.held_out)]
        rewards = ", ".join(f"{name} {value:.3f}" for name, value in known if value is not None)
        return f"the adapter of run {self.run}{step}" + (f" ({rewards})" if rewards else "")


def find_adapter(run_dir: Path, which: str | int = "last") -> Origin:
    """which: `last`, `best`, or the step of a checkpoint. Raises ConfigError, saying what there is."""
    if which == "best":
        return _best(run_dir)
    if which == "last":
        return _last(run_dir)
    if not str(which).isdecimal():
        raise ConfigError(f"Expected last, best or the step of a checkpoint, got {which!r}.")
    step, saved = int(which), _checkpoints(run_dir)
    if step in saved:
        return _origin(run_dir, saved[step], step)
    if step and _is_adapter(run_dir / "adapter") and step == final_step(run_dir):
        return _origin(run_dir, run_dir / "adapter", step)
    raise ConfigError(
        f"{run_dir} has no checkpoint of step {step}.",
        why="grpo.save_steps says how often one is written, grpo.save_total_limit how many are kept.",
        remedy=f"There are: {_what_there_is(run_dir)}.",
    )


def _last(run_dir: Path) -> Origin:
    """The newest: what training ended with, unless a run that went on was killed after it."""
    saved, final = _checkpoints(run_dir), run_dir / "adapter"
    newest, ended = max(saved, default=None), final_step(run_dir) or None
    if _is_adapter(final) and (newest is None or ended is None or ended >= newest):
        return _origin(run_dir, final, ended)
    if newest is None:
        raise ConfigError(
            f"{run_dir} has no adapter yet.",
            why="The run ended before its first checkpoint, or has not come so far.",
            remedy="Wait for it, or set grpo.save_steps.",
        )
    return _origin(run_dir, saved[newest], newest)


def _best(run_dir: Path) -> Origin:
    folder = run_dir / "best"
    if not _is_adapter(folder):
        raise ConfigError(
            f"{run_dir} has no best adapter.",
            why="It is kept when evaluation.every is above 0 and evaluation.keep_best is true, once a reward is known.",
            remedy=f"There are: {_what_there_is(run_dir)}.",
        )
    if known := best_adapter.read(run_dir):
        origin = _origin(run_dir, folder, known.step)
        if origin.held_out in (None, known.reward_mean):
            return origin
        # The run was resumed and took that step again: what it recorded then is of another adapter.
        return msgspec.structs.replace(origin, reward=None, held_out=known.reward_mean)
    summary = summary_of(run_dir)
    evaluated = [record for record in _lines(run_dir / "evaluations.jsonl", Evaluation) if record.step > 0]
    best = max(evaluated, key=lambda record: record.reward_mean, default=None)
    step = summary.best_step if summary and summary.best_step is not None else best.step if best else None
    return _origin(run_dir, folder, step)


def _origin(run_dir: Path, folder: Path, step: int | None) -> Origin:
    if step is None:
        return Origin(run_dir.resolve().name, folder)
    steps = [item for item in _lines(run_dir / "metrics.jsonl", StepMetrics) if item.step == step]
    held_out = [item for item in _lines(run_dir / "evaluations.jsonl", Evaluation) if item.step == step]
    return Origin(
        run=run_dir.resolve().name,
        folder=folder,
        step=step,
        reward=steps[-1].reward_mean if steps else None,
        held_out=held_out[-1].reward_mean if held_out else None,
    )


def _checkpoints(run_dir: Path) -> dict[int, Path]:
    """Those that hold an adapter, by step."""
    found = (run_dir / "checkpoints").glob("checkpoint-*")
    named = {folder.name.rpartition("-")[2]: folder for folder in found if _is_adapter(folder)}
    return {int(number): folder for number, folder in named.items() if number.isdecimal()}


def _is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def _what_there_is(run_dir: Path) -> str:
    names = [name for name, folder in (("last", "adapter"), ("best", "best")) if _is_adapter(run_dir / folder)]
    return ", ".join([*names, *map(str, sorted(_checkpoints(run_dir)))]) or "none"


def _lines(path: Path, type_: type[T]) -> Iterator[T]:
    """The records of a file of lines, which somebody may be writing."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            yield msgspec.json.decode(line, type=type_)
        except msgspec.MsgspecError:
            continue
