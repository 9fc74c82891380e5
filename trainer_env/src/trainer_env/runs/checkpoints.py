"""What a run leaves behind: checkpoints to go on from, and the final adapter."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError

NEEDED = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
"""Transformers writes a checkpoint in place, in about this order: one that lacks the last was cut short."""


def step_of(folder: Path) -> int:
    """The optimizer steps a checkpoint folder holds, or -1 for a folder that is none or that is not whole."""
    name, _, number = folder.name.rpartition("-")
    if name != "checkpoint" or not number.isdigit() or not all((folder / file).is_file() for file in NEEDED):
        return -1
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except ValueError:
        return -1
    return int(number) if state.get("global_step") == int(number) else -1


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in a folder, or None."""
    found = [(step_of(path), path) for path in folder.glob("checkpoint-*")]
    step, path = max(found, default=(-1, None), key=lambda item: item[0])
    return path if step > 0 else None


def checkpoint_to_resume(folder: Path) -> Path:
    """The newest whole checkpoint in a folder. Raises ConfigError when there is none to go on from."""
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        raise ConfigError(
            f"There is no whole checkpoint in {folder} to go on from.",
            why="The run ended before it wrote one: grpo.save_steps says how often it does.",
            remedy="Start it anew under another name, with grpo.save_steps set.",
        )
    return checkpoint


def save_adapter(model: Any, folder: Path, *, beside: Mapping[str, bytes] | None = None) -> None:
    """Write the trained adapter in PEFT's format, aside and then renamed, in place of an older one.

    beside: further files of the folder, by name.
    """
    from trainer_env.publishing.packing import ADAPTER  # Torch takes seconds; finding a checkpoint does not need it.

    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(str(aside), selected_adapters=[ADAPTER], save_embedding_layers=False)
        for name, content in (beside or {}).items():
            (aside / name).write_bytes(content)
        aside.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / folder.name)
            aside.rename(folder)
            shutil.rmtree(old)
        else:
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
