"""Whether a model has the layers that are to get an adapter. PEFT leaves out in silence those that it has not."""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge.errors import ConfigError
from bridge.hub_cache import model_folder
from bridge.settings import nearest
from trainer_env.config import LoraConfig

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_LONGEST_HEADER = 100_000_000
"""Bytes; what the format allows."""
_EXPERTS = "experts"
"""Part of the names of layers that may be loaded under others, all experts' in one tensor."""


def require_layers(lora: LoraConfig, layers: Sequence[str], model: str) -> None:
    """Raise ConfigError for a target that is the name, or the end of the name, of none of the layers.

    layers: full names. The default targets are those of most models: another one has to have one of them. Nothing is
    said of a model whose layers are not known, or that has experts.
    """
    missing = [name for name in lora.target_modules if not any(f".{layer}".endswith(f".{name}") for layer in layers)]
    by_default = lora.target_modules == LoraConfig().target_modules and len(missing) < len(lora.target_modules)
    if not layers or not missing or by_default or any(_EXPERTS in layer.split(".") for layer in layers):
        return
    near = nearest(missing[0], sorted({layer.rpartition(".")[2] for layer in layers}))
    raise ConfigError(
        f"lora.target_modules: {model} has no layer {missing[0]!r}.",
        why="A target is a layer's name, or the end of it.",
        remedy=f"Did you mean {near!r}?" if near else "Name layers that the model has, such as q_proj in most.",
    )


def require_stored_layers(lora: LoraConfig, path: str, model: str) -> None:
    """As `require_layers`, by the weights that are stored, where there are any. path: as `models.resolve` has it.

    Only the last part of a target's name is looked for: those before it may be others once the model is loaded.
    """
    last = tuple(name.rpartition(".")[2] for name in lora.target_modules)
    require_layers(msgspec.structs.replace(lora, target_modules=last), stored_layers(path), model)


def stored_layers(path: str) -> list[str]:
    """The full names of the layers whose weights are stored; empty where there are none to look at."""
    folder = model_folder(path)
    try:
        tensors = _tensors(folder) if folder else []
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []  # Whoever loads it says what is wrong with it.
    return sorted({name.rpartition(".")[0] for name in tensors} - {""})


def _tensors(folder: Path) -> list[str]:
    """As the index of several files has them, else the head of the one."""
    if (folder / _INDEX).is_file():
        return list(json.loads((folder / _INDEX).read_bytes())["weight_map"])
    with (folder / _WHOLE).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return list(json.loads(file.read(length))) if length <= _LONGEST_HEADER else []
