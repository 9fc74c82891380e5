"""Which example comes when, for a whole run in advance.

TRL's own shuffling cannot be resumed beyond the first pass: its sampler starts its generator anew, so pass two repeats
the order of pass one. Here the order is a list that depends on the seed alone. A checkpoint's step is a position in it,
and a longer run has the same beginning.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

from trainer_env.config import TrainConfig
from trainer_env.data import Example, column_names, columns


def order(examples: int, prompts: int, *, seed: int, shuffle: bool) -> list[int]:
    """Indices of `prompts` examples: pass after pass over all, each pass in an order of its own if shuffled."""
    if examples < 1:
        raise ValueError("There is no example to train on.")
    indices: list[int] = []
    for epoch in range(math.ceil(prompts / examples)):
        one_pass = list(range(examples))
        if shuffle:
            random.Random(f"{seed}/{epoch}").shuffle(one_pass)  # noqa: S311 (an order, not a secret)
        indices.extend(one_pass)
    return indices[:prompts]


class Schedule:
    """Which prompts each generation batch of a run has, for each of its ranks, and which optimizer steps train on it.

    A generation batch is what one call of rollout_func per rank brings; they are counted from 0 over the whole run, as
    optimizer steps are.
    """

    def __init__(self, config: TrainConfig, examples: Sequence[Example], *, rank: int = 0, ranks: int = 1) -> None:
        grpo = config.grpo
        self.examples = examples
        self._rank = rank
        self._accumulation = grpo.gradient_accumulation_steps
        self._uses = grpo.generation_steps * grpo.num_iterations
        self._n = grpo.num_generations
        self._rows = grpo.per_device_train_batch_size * grpo.generation_steps
        self._all_rows = self._rows * ranks
        self.batches = -(-grpo.max_steps * self._accumulation // self._uses)
        """How many there are."""
        prompts = self.batches * self._all_rows // self._n
        self.indices = order(len(examples), prompts, seed=config.seed, shuffle=grpo.shuffle_dataset)
        """Of the examples, in the order of the run, each once for a group."""

    def prompts(self, batch: int) -> list[Any]:
        """What this rank is asked for in that batch: one prompt a row, as TRL repeats them."""
        first = batch * self._all_rows + self._rank * self._rows
        rows = range(first, first + self._rows)
        return [self.examples[self.indices[row // self._n]].prompt for row in rows]

    def batch_at(self, step: int) -> int:
        """The batch that the next optimizer step trains on (the first of them, when it trains on several)."""
        return step * self._accumulation // self._uses

    def last_step(self, batch: int) -> int:
        """The last optimizer step that trains on a batch, counted from 0."""
        return ((batch + 1) * self._uses - 1) // self._accumulation


def training_rows(schedule: Schedule) -> Any:
    """The whole run's examples in order, as one pass over a datasets.Dataset.

    Rows are looked up when they are read, so that no type changes on the way: Arrow would give all messages of a
    conversation the same keys.
    """
    from datasets import Dataset

    examples = schedule.examples
    names = column_names(examples)

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return columns([examples[index] for index in batch["example"]], names)

    return Dataset.from_dict({"example": schedule.indices}).with_transform(rows)
