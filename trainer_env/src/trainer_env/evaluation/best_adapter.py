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


def restored(run_dir: Path, step: int) -> Best | None:
    """What is there of a run that goes on from a step. An adapter of a later one is removed: it will be made again."""
    best = read(run_dir)
    if best is not None and best.step <= step:
        return best
    shutil.rmtree(run_dir / NAME, ignore_errors=True)
    return None
