"""What of a long run is left out of its report, so that the page stays small: evenly, and said in words."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

from msgspec.structs import replace

from trainer_env.runs.records import Sample, StepMetrics

T = TypeVar("T")

MOST_STEPS = 4000
"""Points that a curve may have."""
MOST_TEXT = 12_000
"""Characters of one prompt or completion."""
_EVALUATIONS = 0.4
"""Their share of what samples may take, at least."""
_RECORD_BYTES = 200
"""Of a sample beside its texts."""


def thinned_steps(steps: Sequence[StepMetrics]) -> tuple[Sequence[StepMetrics], str]:
    """Steps at even distances, the first and the last among them, and those in which the halves disagreed; and what to
    say of it.
    """
    every = -(-len(steps) // MOST_STEPS)
    if every < 2:
        return steps, ""
    kept = _each(steps, every)
    disagreed = [metrics for metrics in steps if metrics.proof == "disagrees"]
    some = _each(disagreed, _pace(len(disagreed), MOST_STEPS)) if disagreed else []
    if not some:
        return kept, f"Of {len(steps):,} steps every {_th(every)} is shown."
    each = "each" if len(some) == len(disagreed) else f"{len(some):,} of the {len(disagreed):,}"
    shown = {metrics.step: metrics for metrics in (*kept, *some)}
    return (
        [shown[step] for step in sorted(shown)],
        f"Of {len(steps):,} steps every {_th(every)} is shown, and {each} in which trainer and server disagreed.",
    )


def thinned(samples: Sequence[Sample], most_bytes: int) -> tuple[list[Sample], str]:
    """Samples that take about so many bytes, by step, and what to say of those that are left out.

    Of evaluations the same examples are kept everywhere, of training whole steps, each at even distances.
    """
    shortened = [_shortened(sample) for sample in samples]
    groups = [list(group) for _, group in groupby(sorted(shortened, key=_order), key=_order)]
    held_out = [group for group in groups if group[0].phase != "train"]
    training = [group for group in groups if group[0].phase == "train"]
    room_for_evaluations = max(most_bytes * _EVALUATIONS, most_bytes - sum(map(_bytes, training)))
    examples = _pace(sum(map(_bytes, held_out)), room_for_evaluations)
    kept = [_each(group, examples) if examples > 1 else group for group in held_out]
    steps = _pace(sum(map(_bytes, training)), most_bytes - sum(map(_bytes, kept)))
    kept += _each(training, steps) if steps > 1 else training
    notes = []
    if examples > 1:
        notes.append(f"of each evaluation every {_th(examples)} answer")
    if steps > 1:
        notes.append(f"of training the samples of every {_th(steps)} step that has any")
    note = f"To keep this page small it holds {' and '.join(notes)}; samples.jsonl has them all." if notes else ""
    if shortened != list(samples):
        note = f"{note} Texts of more than {MOST_TEXT:,} characters are cut in the middle.".strip()
    return [sample for group in sorted(kept, key=lambda group: _order(group[0])) for sample in group], note


def _order(sample: Sample) -> tuple[int, int]:
    return sample.step, ("eval_before", "train", "eval", "eval_after").index(sample.phase)


def _pace(size: float, room: float) -> int:
    """Every so many-th is kept, to fit."""
    return max(1, -int(-size // max(room, 1)))


def _each(items: Sequence[T], every: int) -> list[T]:
    """Every so many-th, and the last."""
    kept = list(items[::every])
    return kept if (len(items) - 1) % every == 0 else [*kept, items[-1]]


def _bytes(samples: Sequence[Sample]) -> int:
    return sum(_RECORD_BYTES + len(sample.prompt.encode()) + len(sample.completion.encode()) for sample in samples)


def _shortened(sample: Sample) -> Sample:
    if max(len(sample.prompt), len(sample.completion)) <= MOST_TEXT:
        return sample
    return replace(sample, prompt=_cut(sample.prompt), completion=_cut(sample.completion))


def _cut(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _th(number: int) -> str:
    return f"{number}{'th' if number % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
