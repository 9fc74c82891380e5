"""Which example comes when, for a whole run in advance.

TRL's own shuffling cannot be resumed beyond the first pass: its sampler starts its generator anew, so pass two repeats
the order of pass one. Here the order is a list that depends on the seed alone. A checkpoint's step is a position in it,
and a longer run has the same beginning.
"""

import math
import os
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


def training_rows(config: TrainConfig, examples: Sequence[Example]) -> Any:
    """The whole run's examples in order, as one pass over a datasets.Dataset.

    Rows are looked up when they are read, so that no type changes on the way: Arrow would give all messages of a
    conversation the same keys.
    """
    from datasets import Dataset

    grpo = config.grpo
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    groups = grpo.per_device_train_batch_size * ranks * grpo.generation_steps // grpo.num_generations
    windows = -(-grpo.max_steps * grpo.gradient_accumulation_steps // (grpo.generation_steps * grpo.num_iterations))
    indices = order(len(examples), groups * windows, seed=config.seed, shuffle=grpo.shuffle_dataset)
    names = column_names(examples)

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        return columns([examples[index] for index in batch["example"]], names)

    return Dataset.from_dict({"example": indices}).with_transform(rows)
