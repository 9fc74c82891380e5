"""Where the Hugging Face libraries keep what they fetched. Read from the cache's layout: either half may lack them.

A model `owner/name` is the folder `models--owner--name`: `refs/main` holds the revision that was fetched last, and
`snapshots/REVISION/` its files, as links.
"""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The cache, as huggingface_hub finds it: HF_HUB_CACHE, else `hub` in HF_HOME, else ~/.cache/huggingface/hub."""
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return _named(named)
    home = environment.get("HF_HOME")
    return (_named(home) if home else _named(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface") / "hub"


def model_folder(model: str) -> Path | None:
    """Where a model's files lie on this machine: the folder of that name, else what was fetched from the hub.

    None when neither is there. What was fetched may be a part: the config without the weights.
    """
    return local_folder(model) or snapshot(model)


def local_folder(model: str) -> Path | None:
    """The folder of that name; None when there is none."""
    folder = expanded(model)
    try:
        return folder if model and folder.is_dir() else None
    except OSError:  # The name is longer than any file's.
        return None


def snapshot(model: str) -> Path | None:
    """The folder with the newest revision of a hub's model that was fetched; None when there is none."""
    cached = cache_folder() / "--".join(["models", *model.split("/")])
    try:
        revision = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    folder = cached / "snapshots" / revision
    return folder if revision and folder.is_dir() else None


def expanded(path: str) -> Path:
    """With `~` and `~user` as the folders they mean; as it is where that user, or one's own folder, is unknown."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises there)


def _named(path: str) -> Path:
    return expanded(os.path.expandvars(path))
