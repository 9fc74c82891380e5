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


def weights_bytes(model: str) -> int | None:
    """Bytes of a model's weights as they are stored; None where nobody here knows.

    The hub is asked about a model that is not in its cache: one question, which waits some seconds at most.
    """
    if model.startswith(PREFIX):
        return BUILTIN.get(model.removeprefix(PREFIX).partition("?")[0])
    if folder := local_folder(model):
        return _in_folder(folder)
    fetched = snapshot(model)
    return (_in_folder(fetched) if fetched else None) or _on_hub(model)


def _in_folder(folder: Path) -> int | None:
    """As the index says, which may have been fetched before the weights; without one, as the files are."""
    try:
        total = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, LookupError, TypeError):
        total = None
    if isinstance(total, int | float) and total > 0:
        return int(total)
    return _stored({path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()})


def _on_hub(model: str) -> int | None:
    without_statistics()
    if unreachable():
        return None
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=PATIENCE_S).siblings or []
    except Exception:  # noqa: BLE001 (each of its versions raises others; what is wrong with the name is said later)
        return None
    return _stored({file.rfilename: file.size or 0 for file in files})


def _stored(sizes: Mapping[str, int]) -> int | None:
    """Bytes of the weights among a model's files. Some models come in several formats, of which one is loaded."""
    for wanted in _FORMATS:
        if total := sum(size for name, size in sizes.items() if "/" not in name and fnmatch(name, wanted)):
            return total
    return None
