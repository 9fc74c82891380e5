"""pass@k: the chance that at least one of k answers to an example is right, estimated from n >= k answers to it."""

import math
import statistics
from collections.abc import Sequence


def pass_at(n: int, right: Sequence[int]) -> dict[str, float]:
    """Pass@k for each of `ks`, the mean over all examples. right: of the n answers to each example, how many."""
    return {str(k): statistics.fmean(estimate(n, count, k) for count in right) for k in ks(n)}


def ks(n: int) -> list[int]:
    """For which k it is told: the powers of two up to n, and n."""
    return sorted({1 << power for power in range(n.bit_length())} | {n})


def estimate(n: int, right: int, k: int) -> float:
    """The share of all choices of k among n answers that hold one of the `right` ones.

    Without bias, unlike 1 - (1 - right / n) ** k: Chen et al. 2021, https://arxiv.org/abs/2107.03374.
    """
    return 1 - math.comb(n - right, k) / math.comb(n, k)
