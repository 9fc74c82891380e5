"""Finding the checkpoint to go on from. Transformers writes them in place, so one may have been cut short."""

import json
from pathlib import Path

NEEDED = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json")
"""Written in about this order; trainer_state.json comes last."""


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
