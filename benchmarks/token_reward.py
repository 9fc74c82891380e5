"""A reward that costs nothing and never agrees within a group: what is timed is everything else."""

from collections.abc import Sequence
from typing import Any


def reward(*, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """From 0 to 1, by the sum of the token ids. Equal rewards would leave the weights where they are."""
    return [(sum(ids) % 997) / 996 for ids in completion_ids]
