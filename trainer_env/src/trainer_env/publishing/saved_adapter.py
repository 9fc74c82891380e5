"""An adapter that a run has saved, as the bytes that training published: for a server that does not hold it."""

import filecmp
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.digest import digest
from bridge.errors import ConfigError
from bridge.protocol import AdapterLoaded, PublishAdapter, ServerStatus
from trainer_env.config import TrainConfig
from trainer_env.evaluation import best_adapter
from trainer_env.runs.checkpoints import last_checkpoint, step_of
from trainer_env.runs.run_reader import final_step, steps_taken
from trainer_env.serving.server import Server

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Saved:
    """An adapter in the run's folder, and the optimizer step that it is served under."""

    folder: Path
    version: int


def missing(
    status: ServerStatus, run_dir: Path, version: int, *, may_come: bool = False, given: Saved | None = None
) -> Saved | None:
    """What the run has saved of a version (-1: the newest) and the server has yet to be given.

    None: it holds it, or says that it does not when it is asked. may_come: the run trains, so only what is newer than
    all that the server has can be given, and others may bring what is asked for. given: what the server last got of
    this run's folder. One that is not newer takes the place of all that the server has: see `must_begin_anew`.
    Raises ConfigError for a version that nobody has, for which the server would wait, and for the newest of a run that
    has trained and saved nothing, for which the base model would answer.
    """
    newest = status.version
    if may_come:
        found = _checkpoint(run_dir, version)
        return found if found and found.version > newest else None
    if version < 0:
        return _newest(run_dir, newest, given)
    found, trained = _best(run_dir), _checkpoint(run_dir, version) or _final(run_dir, version)
    if found is None or found.version != version:
        found = trained
    if version > newest and not found:
        raise ConfigError(
            f"There is no adapter version {version}: the server's newest is {newest}, and the run has not saved that "
            "one.",
            remedy="Leave the version out for the newest.",
        )
    has = given if given and given.version == version else trained  # Where training published it, that is what it left.
    other = has and found and not _same(has, found)
    return None if version in (0, *status.loaded) and not other else found


def must_begin_anew(status: ServerStatus, saved: Saved) -> bool:
    """Whether the server takes an adapter only as the first one of a new epoch: versions rise in one."""
    return saved.version <= status.version


def in_the_way(status: ServerStatus, run_dir: Path, step: int) -> bool:
    """Whether the server takes the checkpoint of this step only in a new epoch: what it has is newer, or may be the
    best adapter of that number, of a time when the run took the step otherwise. Identical bytes it knows again.
    """
    best, checkpoint = _best(run_dir), _checkpoint(run_dir, step)
    other = best and checkpoint and best.version == step and not _same(best, checkpoint)
    return status.version > step or (status.version == step and bool(other))


def _newest(run_dir: Path, newest: int, given: Saved | None) -> Saved | None:
    """The newest that was saved, unless the server has it or what came after it."""
    best, recorded = _best(run_dir), steps_taken(run_dir)
    saved = max(
        filter(None, (_checkpoint(run_dir, -1), _final(run_dir, -1))), default=best, key=lambda found: found.version
    )
    if saved is None and recorded and not newest:
        raise ConfigError(
            f"Run {run_dir.name!r} has taken {recorded} optimizer steps, and no adapter of it is saved.",
            why="It was ended before its first checkpoint: grpo.save_steps says how often there is one.",
            remedy="Ask for the base model (version 'base', or --version base), or train it again with grpo.save_steps "
            "set.",
        )
    if saved is None or saved.version > newest:
        return saved
    # What it serves may be the best adapter, of a step that a resumed run has yet to take again or has taken otherwise.
    if best is None or best.version != newest or _same(saved, best):
        return None
    if given and given.version == newest:
        return saved if _same(given, best) else None
    return saved if newest > recorded or saved.version == newest else None  # It knows again what it has.


def _checkpoint(run_dir: Path, version: int) -> Saved | None:
    folder = run_dir / "checkpoints"
    found = last_checkpoint(folder) if version < 0 else folder / f"checkpoint-{version}"
    return Saved(found, step_of(found)) if found and step_of(found) > 0 else None


def _final(run_dir: Path, version: int) -> Saved | None:
    """What training ended with."""
    folder, step = run_dir / "adapter", final_step(run_dir)
    whole = (folder / FILE).is_file() and (folder / CONFIG).is_file()
    return Saved(folder, step) if whole and step and version in (-1, step) else None


def _best(run_dir: Path) -> Saved | None:
    folder, best = run_dir / best_adapter.NAME, best_adapter.read(run_dir)
    return Saved(folder, best.version) if best and (folder / FILE).is_file() else None


def _same(one: Saved, other: Saved) -> bool:
    """Whether they are the same adapter: the best one may be a checkpoint's as well. One that is gone by now is not."""
    try:
        return one == other or (
            one.version == other.version and filecmp.cmp(one.folder / FILE, other.folder / FILE, shallow=False)
        )
    except FileNotFoundError:
        return False


def publish(server: Server, saved: Saved, run: TrainConfig) -> AdapterLoaded:
    """Make the server serve a saved adapter under its step. Raises what the server answers."""
    payload = packed((saved.folder / FILE).read_bytes(), run.publish_dtype)
    config = json.loads((saved.folder / CONFIG).read_text(encoding="utf-8"))
    if config.get("use_rslora"):  # As training publishes it: a plain scaling, which both engines compute.
        config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}
    request = PublishAdapter(
        version=saved.version,
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
