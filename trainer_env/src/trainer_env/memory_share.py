"""How much of its GPUs' memory the engine may take, and whether a model fits there beside the trainer."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bridge.errors import ConfigError
from trainer_env.devices import Device, gib

GpuMode = Literal["split", "shared", "time-share"]

LEAST_SHARED = 0.3
"""With less for the engine beside a trainer that keeps its memory, the halves take turns."""

_MARGIN = 0.05
"""Share of a GPU left alone beside what the engine takes: the driver and CUDA's own memory."""
_ALL = 0.9
_MOST = 0.6
"""The largest share beside a trainer, of which not all is known; unless the engine's weights need more."""
_ENGINE_BYTES = 2 * 2**30
"""What an engine needs beside the weights at least: activations, a little cache."""
_ENGINE_EASY_BYTES = 4 * 2**30
_SGLANG_ON_TOP = 0.1
_SGLANG_ON_TOP_BYTES = 6 * 2**30
"""Share of a GPU, and at most so many bytes, that SGLang leaves to activations and CUDA graphs before it counts weights
and cache; sglang_memory.py of the server half does."""
_WAITING_BYTES = 2 * 2**30
"""What a trainer holds beside its weights while it waits for its turn: CUDA's own memory, adapter and optimizer."""
_TRAINING_BYTES = 6 * 2**30
_TRAINING_WEIGHTS = 2
"""What training takes beside the trainer's weights: so many bytes, and so many times the model's size. The H200 runs in
docs/benchmarks.md stay below."""


class ModelSize(NamedTuple):
    """weights: bytes, as the engine loads them. in_4bit: the trainer quantizes its own copy."""

    weights: int
    in_4bit: bool = False

    @property
    def trained(self) -> int:
        """Bytes of the trainer's copy."""
        return self.weights // 4 if self.in_4bit else self.weights


def trainer_bytes(mode: GpuMode, model: ModelSize | None, given: int = 0) -> int | None:
    """What the trainer needs of a GPU while the engine computes on it. given: what the user says that training takes.

    None when nobody knows.
    """
    if mode == "split":
        return 0
    if mode == "shared":
        return given or (model and _TRAINING_BYTES + _TRAINING_WEIGHTS * model.weights + model.trained)
    return model and _WAITING_BYTES + model.trained


def share(mode: GpuMode, server: Sequence[Device], model: ModelSize | None, beside: int, backend: str) -> float | None:
    """What the engine may take of each of its GPUs: of the fullest one's free memory, a margin less.

    beside: bytes of it for the trainer; backend: the engine. None, for the engine's own choice, when a GPU's memory is
    not known or when whole GPUs are its own.
    """
    sizes = [(device.free_bytes, device.total_bytes) for device in server if device.free_bytes and device.total_bytes]
    if len(sizes) < len(server):
        return None
    room = min((free - beside) / total for free, total in sizes) - _MARGIN
    if mode == "split":
        return None if room >= _ALL else max(0.01, math.floor(room * 100) / 100)
    least = min(total for _, total in sizes)
    easy = (model.weights + _ENGINE_EASY_BYTES + _on_top(backend, least, least)) / least if model else 0
    return max(0.01, min(max(_MOST, easy), math.floor(room * 100) / 100))


def fits(share: float | None, device: Device, model: ModelSize | None, backend: str) -> bool:
    """Whether a model's weights fit into an engine's share of a GPU, as far as is known."""
    if share is None or model is None or device.total_bytes is None:
        return True
    return share * device.total_bytes >= _least(share, device.total_bytes, model, backend)


def _least(share: float, total: int, model: ModelSize, backend: str) -> float:
    """Bytes of a GPU without which an engine does not start."""
    return model.weights + _ENGINE_BYTES + _on_top(backend, share * total, total)


def _on_top(backend: str, allowed: float, total: int) -> float:
    """Bytes of those allowed that SGLang does not give to weights and cache. vLLM measures what it needs."""
    return min(_SGLANG_ON_TOP * total, _SGLANG_ON_TOP_BYTES, allowed / 2) if backend == "sglang" else 0


def require_fit(  # noqa: PLR0917
    mode: GpuMode, share: float | None, device: Device, model: ModelSize | None, beside: int, backend: str
) -> None:
    """Raise ConfigError when a model does not fit into what one GPU leaves the engine.

    beside: bytes that the trainer keeps of it.
    """
    if fits(share, device, model, backend):
        return
    assert share is not None
    assert model is not None
    assert device.total_bytes is not None
    smaller = "" if model.in_4bit else "model.load_in_4bit=true, which makes the trainer's copy smaller, "
    raise ConfigError(
        f"placement: {mode} leaves the engine {gib(int(share * device.total_bytes))} GiB of GPU {device.id}, and the "
        "model's weights with the least of cache and room to compute take "
        f"{gib(int(_least(share, device.total_bytes, model, backend)))}.",
        why=f"Of {gib(device.free_bytes or 0)} GiB that are free, the trainer keeps about {gib(beside)} meanwhile.",
        remedy=("Use --placement time-share, " if mode == "shared" else "Use ")
        + f"{smaller}a smaller model or a second GPU; or set server.memory_share by hand.",
    )
