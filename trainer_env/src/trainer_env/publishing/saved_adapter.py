"""An adapter that a run has saved, as the bytes that training published: for a server that does not hold it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from bridge.digest import digest
from bridge.errors import ConfigError
from bridge.protocol import AdapterLoaded, PublishAdapter, Status
from trainer_env.config import TrainConfig
from trainer_env.evaluation import best_adapter
from trainer_env.runs.checkpoints import last_checkpoint, step_of
from trainer_env.serving.server import Server

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def missing(server: Server, run_dir: Path, version: int, *, may_come: bool = False) -> Path | None:
    """The folder of a version (-1: the newest) that the run has saved and that the server can still be given.

    None: it holds it, or says that it does not when it is asked. may_come: the run trains. Without, a version that
    nobody has is a ConfigError: the server would wait for it.
    """
    newest = server.ask(Status()).version
    if version < 0:
        checkpoint = last_checkpoint(run_dir / "checkpoints")
        return checkpoint if checkpoint and step_of(checkpoint) > newest else None
    if version <= newest:  # Versions rise: an older one would take the place of what is newer, and perhaps not saved.
        return None
    checkpoint = run_dir / "checkpoints" / f"checkpoint-{version}"
    if step_of(checkpoint) == version:
        return checkpoint
    best = best_adapter.read(run_dir)
    if best and best.version == version:
        return run_dir / best_adapter.NAME
    if may_come:
        return None
    raise ConfigError(
        f"There is no adapter version {version}: the server's newest is {newest}, and the run has not saved that one.",
        remedy="Leave the version out for the newest.",
    )


def publish(server: Server, folder: Path, run: TrainConfig) -> AdapterLoaded:
    """Make the server serve a saved adapter under its step. folder: of a checkpoint, or best/.

    Raises what the server answers.
    """
    payload = packed((folder / FILE).read_bytes(), run.publish_dtype)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("use_rslora"):  # As training publishes it: a plain scaling, which both engines compute.
        config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}
    best = best_adapter.read(folder.parent) if folder.name == best_adapter.NAME else None
    request = PublishAdapter(
        version=best.version if best else step_of(folder),
        digest=digest(payload),
        adapter_config=config | {"inference_mode": True},
        deadline_s=run.rollout.publish_timeout_s,
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
