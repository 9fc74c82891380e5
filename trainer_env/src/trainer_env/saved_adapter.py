"""An adapter that a run has saved, as the bytes that training published: for a server that does not hold it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from bridge.digest import digest
from bridge.protocol import AdapterLoaded, PublishAdapter
from trainer_env import best_adapter
from trainer_env.checkpoints import last_checkpoint, step_of
from trainer_env.server import Server

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def last(run_dir: Path) -> int:
    """The optimizer step of the newest adapter that a run has saved; 0: it has none."""
    checkpoint = last_checkpoint(run_dir / "checkpoints")
    return step_of(checkpoint) if checkpoint else 0


def find(run_dir: Path, step: int) -> Path | None:
    """The folder of a step's adapter: a checkpoint, or the best one."""
    checkpoint = run_dir / "checkpoints" / f"checkpoint-{step}"
    if step_of(checkpoint) == step:
        return checkpoint
    best = best_adapter.read(run_dir)
    return run_dir / "best" if best and best.step == step else None


def publish(server: Server, folder: Path, version: int, *, dtype: str, timeout_s: float) -> AdapterLoaded:
    """Make the server serve a saved adapter. dtype: what training publishes in. Raises what the server answers."""
    payload = packed((folder / FILE).read_bytes(), dtype)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("use_rslora"):  # As training publishes it: a plain scaling, which both engines compute.
        config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}
    request = PublishAdapter(
        version=version, digest=digest(payload), adapter_config=config | {"inference_mode": True}, deadline_s=timeout_s
    )
    return server.ask(request, payload)


def packed(file: bytes, dtype: str) -> bytes:
    """A safetensors file with its tensors in the order of their names, in that dtype, as `packing.Packer` lays it out.

    So what training publishes again when it goes on has the digest that the server knows.
    """
    size = int.from_bytes(file[:8], "little")
    header: dict[str, Any] = json.loads(file[8 : 8 + size])
    header.pop("__metadata__", None)
    data = memoryview(file)[8 + size :]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name in sorted(header):
        begin, stop = header[name]["data_offsets"]
        part, kind = _as_dtype(data[begin:stop], header[name]["dtype"], dtype)
        entries[name] = {"dtype": kind, "shape": header[name]["shape"], "data_offsets": [end, end + len(part)]}
        end += len(part)
        parts.append(part)
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *parts])


def _as_dtype(data: memoryview, kind: str, dtype: str) -> tuple[bytes | memoryview, str]:
    if kind == "F32" and dtype == "bfloat16":
        bits = np.frombuffer(data, dtype="<u4")
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)  # To the nearest, ties to even, as torch rounds.
        return (rounded >> 16).astype("<u2").tobytes(), "BF16"
    if kind == "BF16" and dtype == "float32":
        return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).tobytes(), "F32"
    return data, kind
