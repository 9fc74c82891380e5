"""Adapters as SGLang needs them: it stacks some projections, and takes a stack whole or loses part of it.

An adapter of `q_proj` alone does not load there; one of `k_proj` and `v_proj` loads and changes nothing. What is
missing of a stack is added as matrices of zeros, which leave the model as it was.
"""

import json
import math
import mmap
import threading
from pathlib import Path
from typing import Any

from bridge.errors import Refused
from server_env.adapters.peft_adapter import BaseModel, Tensor, read_header
from server_env.adapters.spool import CONFIG, WEIGHTS

STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_one_at_a_time = threading.Lock()
"""Every engine of a server completes a folder before it loads it: the first does it, the others find it whole."""

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def complete(folder: Path, base: BaseModel) -> None:
    """Add to a PEFT folder what its stacks lack. Raises Refused when the base model's shapes are not known. Blocks."""
    with _one_at_a_time:
        _complete(folder, base)


def _complete(folder: Path, base: BaseModel) -> None:
    path = folder / WEIGHTS
    if not path.is_file() or not path.stat().st_size:  # An empty file cannot be mapped.
        raise Refused(f"There is no adapter in {folder}.")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,  # Of most adapters only the header is read.
        memoryview(mapped) as data,
    ):
        missing = _missing(read_header(data), base)
        if not missing:
            return
        completed = _with_zeros(data, missing)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config.get("target_modules"), str):  # A pattern may match anything already.
        targets = {*config["target_modules"], *(name.split(".")[-3] for name in missing)}
        config["target_modules"] = sorted(targets)
    _replace(folder / CONFIG, json.dumps(config, indent=1).encode())
    _replace(path, completed)


def _missing(tensors: dict[str, Tensor], base: BaseModel) -> dict[str, Tensor]:
    """The tensors to add, by name; their offsets mean nothing yet."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, rest = name.rpartition(".lora_A.")
        parent, _, projection = module.rpartition(".")
        stack = next((stack for stack in STACKS if projection in stack), ())
        for other in stack:
            a = f"{parent}.{other}.lora_A.{rest}"
            if rest and a not in tensors:
                rank = tensor.shape[0]
                found[a] = tensor
                found[a.replace(".lora_A.", ".lora_B.")] = Tensor(tensor.dtype, (_outputs(other, base), rank), (0, 0))
    return found


def _outputs(projection: str, base: BaseModel) -> int:
    if base.projections and projection in base.projections:
        return base.projections[projection][1]
    raise Refused(
        f"SGLang serves {projection} only together with the projections that it is stacked with.",
        why="The adapter has some of them, and this model's shapes are not known, so the rest cannot be filled in.",
        remedy=f"Add {projection} to lora.target_modules.",
    )


def _with_zeros(data: memoryview, added: dict[str, Tensor]) -> bytes:
    """The safetensors file with more tensors at its end."""
    start = 8 + int.from_bytes(data[:8], "little")
    end = len(data) - start
    header: dict[str, Any] = json.loads(bytes(data[8:start]))
    for name, tensor in added.items():
        size = math.prod(tensor.shape) * BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (end, end + size)}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join([len(head).to_bytes(8, "little"), head, data[start:], bytes(end - (len(data) - start))])


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(data)
    aside.replace(path)
