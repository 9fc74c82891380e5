"""How far the trainer's logprobs are from the server's for the same tokens: what shows a policy out of sync."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Figures:
    """Means over the completion tokens of one optimizer step, before any truncation. None: there was no token.

    ratio_mean: of exp(trainer's logprob - server's logprob); ratio_error: the standard error of that mean.
    dlogp_mean_abs: of its absolute difference. oldest_version: that sampled one of the step's rows.
    """

    ratio_mean: float | None
    dlogp_mean_abs: float | None
    oldest_version: int | None
    ratio_error: float | None = None
    tokens: int = 0


class Agreement:
    """Running sums of one optimizer step, kept on the device so that a micro-batch costs no synchronization."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self._oldest: torch.Tensor | None = None

    def add(self, trainer: torch.Tensor, server: torch.Tensor, mask: torch.Tensor, versions: torch.Tensor) -> None:
        """Add a micro-batch. trainer, server, mask: (rows, tokens); versions: (rows,), of the adapters that sampled."""
        kept = mask.bool()
        difference = torch.where(kept, trainer.detach().double() - server.double(), 0.0)
        ratios = torch.where(kept, difference.exp(), 0.0)
        sums = torch.stack([ratios.sum(), ratios.square().sum(), difference.abs().sum(), kept.sum().double()])
        self._sums = sums if self._sums is None else self._sums + sums
        oldest = versions.min()
        self._oldest = oldest if self._oldest is None else torch.minimum(self._oldest, oldest)

    def take(self) -> Figures:
        """The step's figures; the next step starts from nothing."""
        figures = self.figures()
        self._sums = self._oldest = None
        return figures

    def figures(self) -> Figures:
        """The figures of the step so far."""
        version = None if self._oldest is None else int(self._oldest)
        if self._sums is None:
            return Figures(None, None, version)
        ratios, squares, differences, tokens = self._sums.tolist()
        if not tokens or not math.isfinite(squares):
            return Figures(None, None, version)
        mean = ratios / tokens
        error = math.sqrt(max(0.0, squares / tokens - mean * mean) / tokens)
        return Figures(mean, differences / tokens, version, error, int(tokens))
