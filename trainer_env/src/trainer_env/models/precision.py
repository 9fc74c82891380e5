"""The number format that the base weights have in both halves, where the config leaves it to the machine."""

from pathlib import Path

import msgspec

from trainer_env.config import TrainConfig
from trainer_env.placement import Placement

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""What a CPU says that computes in bfloat16. Others compute each operation in software: a training step of the demo's
model took over three minutes where float32 took four seconds."""

_BFLOAT16_CAPABILITY = (8, 0)
"""The first NVIDIA GPUs that compute in bfloat16. On older ones vLLM refuses it, and float16 is the fast format."""

CPUINFO = Path("/proc/cpuinfo")


def settled(config: TrainConfig, placement: Placement) -> TrainConfig:
    """The config with model.dtype = "auto" replaced: bfloat16 on GPUs or a CPU that compute in it.

    Else float16 on GPUs, in both halves though only one may need it, and float32 on a CPU.
    """
    if config.model.dtype != "auto":
        return config
    if placement.mode == "cpu":
        dtype = "bfloat16" if computes_bfloat16() else "float32"
    else:
        dtype = "float16" if _without_bfloat16(placement) else "bfloat16"
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))


def computes_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this machine's CPU has instructions for bfloat16."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not _BFLOAT16_FLAGS.isdisjoint(flags)


def remark(config: TrainConfig, placement: Placement) -> str:
    """What people should know of the format that they have chosen, in parentheses; empty: nothing."""
    if config.model.dtype == "bfloat16" and placement.mode == "cpu" and not computes_bfloat16():
        return ' (this CPU computes it in software, many times slower than float32: set model.dtype = "auto")'
    if (older := _without_bfloat16(placement)) and config.model.dtype != "float32":
        advice = ': set model.dtype = "auto"' if config.model.dtype == "bfloat16" else ""
        return f" ({' and '.join(older)} cannot compute in bfloat16{advice})"
    if config.model.load_in_4bit and config.rollout.on_sync_mismatch == "stop":
        return (
            " (4 bits in the trainer alone: the proof of sync may end the run at its first rollout, unless "
            'rollout.on_sync_mismatch = "warn")'
        )
    return ""


def _without_bfloat16(placement: Placement) -> list[str]:
    """The run's GPUs that are too old for bfloat16, as people read them; one of which nothing is known is not."""
    devices = {device.id: device for device in (*placement.server, *placement.trainer)}.values()
    return [f"GPU {device.id}" for device in devices if device.capability and device.capability < _BFLOAT16_CAPABILITY]
