"""The number formats of the base weights and of the adapter on its way, where the config leaves them open."""

from pathlib import Path

import msgspec

from trainer_env.config import TrainConfig
from trainer_env.placement import Placement

_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""What a CPU says that computes in bfloat16. Others compute each operation in software: a training step of the demo's
model took over three minutes where float32 took four seconds."""

CPUINFO = Path("/proc/cpuinfo")


def settled(config: TrainConfig, placement: Placement) -> TrainConfig:
    """The config without "auto".

    model.dtype is bfloat16 on a GPU or a CPU that computes in it, else float32. rollout.publish_dtype is bfloat16 where
    the engine computes in it: both engines would round the adapter so when they load it.
    """
    model, rollout = config.model, config.rollout
    if model.dtype == "auto":
        bfloat16 = placement.mode != "cpu" or computes_bfloat16()
        model = msgspec.structs.replace(model, dtype="bfloat16" if bfloat16 else "float32")
    if rollout.publish_dtype == "auto":
        dtype = "bfloat16" if _engine_dtype(config, model.dtype) == "bfloat16" else "float32"
        rollout = msgspec.structs.replace(rollout, publish_dtype=dtype)
    return msgspec.structs.replace(config, model=model, rollout=rollout)


def _engine_dtype(config: TrainConfig, dtype: str) -> str:
    """What the engine is told to have adapters in: its own table and [server] win over the model's dtype."""
    own = config.vllm if config.backend == "vllm" else config.sglang
    return str(own.get("lora_dtype") or own.get("dtype") or config.server.get("dtype") or dtype)


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
