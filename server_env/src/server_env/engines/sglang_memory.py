"""A share of a GPU in SGLang's terms: of what is free as it starts, and for weights and KV cache alone."""

import math
from collections.abc import Sequence

from bridge.errors import EngineFailed
from server_env.engines.engine import GpuMemory

ON_TOP = 0.1
"""Share of a GPU, and at most so many bytes, for CUDA, activations and graphs, beside SGLang's weights and cache.
memory_share.py of the trainer half counts the same."""
ON_TOP_BYTES = 6 * 2**30

LEAST_BYTES = 2**28
"""With less for weights and cache not even the smallest model starts."""


def unmeasured(share: float) -> float:
    """mem_fraction_static for a GPU of which nothing is known: as if all of it were free."""
    return max(0.01, round(share - ON_TOP, 3))


def measured(share: float, gpus: Sequence[GpuMemory]) -> float:
    """mem_fraction_static with which an engine takes no more than its share of each of its GPUs in all.

    share: of all the memory of a GPU. Raises EngineFailed where that leaves nothing for weights and cache.
    """
    return min(_of_free(share, gpu) for gpu in gpus)


def _of_free(share: float, gpu: GpuMemory) -> float:
    allowed = min(share * gpu.total, gpu.free)
    on_top = min(ON_TOP * gpu.total, ON_TOP_BYTES, allowed / 2)  # A small share is for a model that needs little.
    if allowed - on_top < LEAST_BYTES:
        raise EngineFailed(
            f"SGLang has {_gib(allowed - on_top)} GiB of GPU memory for weights and KV cache: too little to start.",
            why=f"It may take {share:.0%} of a GPU's {_gib(gpu.total)} GiB, of which {_gib(gpu.free)} are free, and "
            f"{_gib(on_top)} of that are for activations and CUDA graphs.",
            remedy="End what else holds that memory, which nvidia-smi shows, or raise server.memory_share.",
        )
    return math.floor((allowed - on_top) / gpu.free * 1000) / 1000


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f}"
