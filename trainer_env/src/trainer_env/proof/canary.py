"""An adapter with a large effect, for the proof of sync: in the trained adapter's place for a moment, never trained.

It covers every module that is trained, at the run's rank and scaling, so that an engine which leaves one out is seen.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainer_env.publishing.packing import ADAPTER

Score = Callable[[], list[float]]
"""Logprobs of some tokens under the weights as they are."""

SHIFT = 1.0
"""Root mean square by which it shifts logprobs, to within a factor of two: far above rounding, and no nonsense yet."""
ROUNDS = 4
FIRST_EFFECT = 0.02
"""What a module's output is moved by at first, relative to its input."""
FASTEST = 4
"""Powers of two by which a size changes at once."""


@contextmanager
def borrowed(model: Any) -> Iterator[dict[str, torch.nn.Parameter]]:
    """The trained adapter's matrices by name, to be overwritten inside; afterwards they are bit for bit what they were.

    model: a PeftModel, unwrapped.
    """
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if f".lora_A.{ADAPTER}." in name or _is_b(name)
    }
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        yield parameters
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
    assert all(torch.equal(parameter, kept[name]) for name, parameter in parameters.items())


class CanaryWeights:
    """Random matrices in place of a borrowed adapter's, in sizes at which each module has about the same effect.

    scaling: lora_alpha / r, as the model applies it. Values are exact in bfloat16, and sizes are powers of two, so that
    an engine that keeps adapters in bfloat16 has the very same ones.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], scaling: float, seed: int = 0) -> None:
        self._parameters = parameters
        generator = torch.Generator().manual_seed(seed)
        self._unit: dict[str, torch.Tensor] = {}
        rank = 1
        for name, parameter in sorted(parameters.items()):
            values = torch.randn(parameter.shape, generator=generator)
            if not _is_b(name):
                rank = parameter.shape[0]
                values /= math.sqrt(parameter.shape[1])
            self._unit[name] = values.bfloat16().to(parameter)
        first = _power_of_two(FIRST_EFFECT / (math.sqrt(rank) * scaling))
        self.sizes = {_module(name): first for name in parameters if _is_b(name)}
        self._put(dict.fromkeys(self.sizes, 0.0))
        with torch.no_grad():
            for name, parameter in parameters.items():
                if not _is_b(name):
                    parameter.copy_(self._unit[name])

    def resize(self, score: Score) -> None:
        """Find sizes at which each module alone has its share of SHIFT. score: of a few tokens, for many forwards."""
        self._put(dict.fromkeys(self.sizes, 0.0))
        base = score()
        share = SHIFT / math.sqrt(len(self.sizes))
        for module in self.sizes:
            for _ in range(ROUNDS):
                self._put(dict.fromkeys(self.sizes, 0.0) | {module: self.sizes[module]})
                factor = _power_of_two(share / max(_rms(score(), base), 1e-6))
                self.sizes[module] *= factor
                if factor == 1:
                    break
        self._put(self.sizes)
        whole = _power_of_two(SHIFT / max(_rms(score(), base), 1e-6))
        if whole != 1:
            self.sizes = {module: size * whole for module, size in self.sizes.items()}
            self._put(self.sizes)

    def without_each(self, score: Score) -> dict[str, list[float]]:
        """Logprobs without one module, by its name; the canary is whole again afterwards."""
        found = {}
        for module in self.sizes:
            self._put(self.sizes | {module: 0.0})
            found[module] = score()
        self._put(self.sizes)
        return found

    def _put(self, sizes: Mapping[str, float]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if _is_b(name):
                    parameter.copy_(self._unit[name] * sizes[_module(name)])


def _is_b(name: str) -> bool:
    return f".lora_B.{ADAPTER}." in name


def _module(name: str) -> str:
    """`q_proj` of `…layers.3.self_attn.q_proj.lora_B.default.weight`."""
    return name.partition(".lora_")[0].rpartition(".")[2]


def _power_of_two(value: float) -> float:
    return 2.0 ** max(-FASTEST, min(FASTEST, round(math.log2(value)))) if value > 2.0**-20 else 2.0**-FASTEST


def _rms(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a))
