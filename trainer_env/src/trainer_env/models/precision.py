"""The number format that the base weights have in both halves, where the config leaves it to the machine."""

from pathlib import Path

import msgspec

from trainer_env.config import TrainConfig
from trainer_env.placement import Placement

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""What a CPU says that computes in bfloat16. Others compute each operation in software: a training step of the demo's
model took over three minutes where float32 took four seconds."""

CPUINFO = Path("/proc/cpuinfo")


def settled(config: TrainConfig, placement: Placement) -> TrainConfig:
    """The config with model.dtype = "auto" replaced: bfloat16 on a GPU or a CPU that computes in it, else float32."""
    if config.model.dtype != "auto":
        return config
    dtype = "bfloat16" if placement.mode != "cpu" or computes_bfloat16() else "float32"
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
    """What people should know of the format that they have chosen; empty: nothing."""
    if config.model.dtype == "bfloat16" and placement.mode == "cpu" and not computes_bfloat16():
        return ' (this CPU computes it in software, many times slower than float32: set model.dtype = "auto")'
    return ""
