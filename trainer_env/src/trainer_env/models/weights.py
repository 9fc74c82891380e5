"""How large a model's weights are: of a folder, of what the hub's cache holds, or as the hub says."""

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from bridge.hub_cache import local_folder, snapshot
from trainer_env.models import BUILTIN, PREFIX
from trainer_env.models.hub import PATIENCE_S, unreachable, without_statistics

_FORMATS = ("model*.safetensors", "*.safetensors", "*.bin")
"""What a model is loaded from: the first of these that it has."""
_INDEX = "model.safetensors.index.json"


_WIDTHS = {"float32": 4, "float64": 8}
"""Bytes of a parameter, where they are not 2."""


def weights_bytes(model: str, dtype: str = "auto") -> int | None:
    """Bytes of a model's weights as they are loaded, whatever they are stored in; None where nobody here knows.

    dtype: float32 takes four bytes a parameter, all others two. The hub is asked about a model that is not in its
    cache: one question, which waits some seconds at most.
    """
    stored, width = _stored_bytes(model)
    return None if stored is None else stored * _WIDTHS.get(dtype, 2) // width


def _stored_bytes(model: str) -> tuple[int | None, int]:
    """Of the weights, and of each parameter in them."""
    if model.startswith(PREFIX):
        return BUILTIN.get(model.removeprefix(PREFIX).partition("?")[0]), 2
    if folder := local_folder(model):
        return _in_folder(folder), _width(folder)
    fetched = snapshot(model)
    if fetched and (size := _in_folder(fetched)):
        return size, _width(fetched)
    return _on_hub(model)


def _width(folder: Path) -> int:
    """Bytes of a parameter, as config.json says."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return _WIDTHS.get(config.get("dtype") or config.get("torch_dtype") or "", 2)
    except (OSError, ValueError, AttributeError, TypeError):
        return 2


def _in_folder(folder: Path) -> int | None:
    """As the index says, which may have been fetched before the weights; without one, as the files are."""
    try:
        total = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, LookupError, TypeError):
        total = None
    if isinstance(total, int | float) and total > 0:
        return int(total)
    return _stored({path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})


def _on_hub(model: str) -> tuple[int | None, int]:
    without_statistics()
    if unreachable():
        return None, 2
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(model, files_metadata=True, timeout=PATIENCE_S)
    except Exception:  # noqa: BLE001 (each of its versions raises others; what is wrong with the name is said later)
        return None, 2
    counts = getattr(getattr(found, "safetensors", None), "parameters", None) or {}
    width = 4 if 2 * counts.get("F32", 0) > sum(counts.values()) else 2
    return _stored({file.rfilename: file.size or 0 for file in found.siblings or []}), width


def _stored(sizes: Mapping[str, int]) -> int | None:
    """Bytes of the weights among a model's files. Some models come in several formats, of which one is loaded."""
    for wanted in _FORMATS:
        if total := sum(size for name, size in sizes.items() if "/" not in name and fnmatch(name, wanted)):
            return total
    return None
