"""The best adapter of a run so far: run_dir/best, in PEFT's format, and best.json in it, which says what it is."""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from trainer_env.runs.checkpoints import save_adapter
from trainer_env.runs.records import Best

NAME = "best"


def keep(model: Any, run_dir: Path, best: Best) -> None:
    """Put the trained adapter there, in place of an older one: both files or neither."""
    save_adapter(model, run_dir / NAME, beside={"best.json": msgspec.json.encode(best) + b"\n"})


def read(run_dir: Path) -> Best | None:
    """What is there; None: nothing, or nothing that can be told."""
    try:
        return msgspec.json.decode((run_dir / NAME / "best.json").read_bytes(), type=Best)
    except (OSError, msgspec.MsgspecError):
        return None


def restored(run_dir: Path, *, resumed: bool) -> Best | None:
    """What a run that begins or goes on finds there. A resumed one keeps it even of a step that it takes again: it was
    measured, and only a better one takes its place. What a new run finds, or what says nothing of itself, is removed.
    """
    best = read(run_dir) if resumed else None
    if best is None:
        shutil.rmtree(run_dir / NAME, ignore_errors=True)
    return best
