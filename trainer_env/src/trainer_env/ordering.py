"""Which example comes when, for a whole run in advance.

TRL's own shuffling cannot be resumed beyond the first pass: its sampler starts its generator anew, so pass two repeats
the order of pass one. Here the order is a list that depends on the seed alone. A checkpoint's step is a position in it,
and a longer run has the same beginning.
"""

import math
import random


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
