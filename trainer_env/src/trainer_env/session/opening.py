"""From what people write to a Session: a config file, or the name of a run, and what this machine has."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from bridge.errors import ConfigError
from trainer_env import arguments
from trainer_env.config import TrainConfig, changed, load, named
from trainer_env.config.rules import require_whole_groups
from trainer_env.devices import detect
from trainer_env.display import in_kernel
from trainer_env.memory_share import ModelSize
from trainer_env.models.weights import weights_bytes
from trainer_env.placement import Placement, depends_on_weights, plan
from trainer_env.runs.checkpoints import last_checkpoint
from trainer_env.runs.finding import CONFIG, RUNS
from trainer_env.serving.left_server import as_it_was_planned

if TYPE_CHECKING:
    from trainer_env.session import Session

S = TypeVar("S", bound="Session")
_opened: "dict[Path, Session]" = {}
"""Sessions that were opened by hand in this process, by their run's folder."""

KEEP_SERVER_S = 900.0
"""How long a notebook's server waits for the next kernel, unless the config says otherwise."""


def opened(
    make: type[S], config: str | Path | TrainConfig | None, overrides: Sequence[str], *, run: str, output_dir: str
) -> S:
    """A session that has started; see `Session.open`. One of the same run that is open in this process makes way."""
    found, source = find(config, overrides, run=run, output_dir=output_dir)
    folder = found.run_dir.resolve()
    placement = place(found, source)
    if not has_begun(folder):  # A run that trained in several can still be asked, and says so when it is to go on.
        require_one_process(placement, source)
    session = make(found, placement, source=source, by_hand=True)
    session.check()
    if (earlier := _opened.get(folder)) and earlier.is_open:  # Only now: a mistake costs nobody their server.
        earlier.make_way()
    _opened.pop(folder, None)  # Not before: one that refuses, or is interrupted, is to make way the next time.
    try:
        session.start()
    except BaseException:
        session.close(now=True)
        raise
    _opened[folder] = session
    return session


def place(config: TrainConfig, source: str) -> Placement:
    """Which half gets what on this machine. source: what errors call the config. Raises ConfigError."""
    devices = as_it_was_planned(detect(), config.run_dir)
    placement = plan(
        config.placement,
        devices,
        overlap=config.lookahead("cpu") > 0,
        server=config.server,
        model=_size(config) if depends_on_weights(config.placement, devices) else None,
    )
    require_whole_groups(config, placement.ranks, source)
    return placement


def _size(config: TrainConfig) -> ModelSize | None:
    weights = weights_bytes(config.model.name, config.model.dtype)
    return None if weights is None else ModelSize(weights, in_4bit=config.model.load_in_4bit)


def require_one_process(placement: Placement, source: str) -> None:
    """Refuse to train by hand what trains in several processes. source: what errors call the config.

    Raises ConfigError.
    """
    if placement.ranks > 1:
        raise ConfigError(
            f"{source}: this run trains in {placement.ranks} processes, one a GPU, and here is one.",
            remedy="Train it with scripts/train.py (--resume RUN goes on with one), or name one GPU: "
            "placement.trainer_gpus=[1].",
        )


def find(
    config: str | Path | TrainConfig | None, overrides: Sequence[str], *, run: str = "", output_dir: str = ""
) -> tuple[TrainConfig, str]:
    """The config of a session that is opened by hand, and what errors call it.

    config: what a new run is made from: a file, a TrainConfig, the bare name of one that comes with Tandem, or None for
    the demo. A run that has begun has a config of its own, which holds instead; so has any run when config is None. The
    overrides are applied to either. run: its name; default: the config's, else one of the time. output_dir: default:
    the config's. Raises ConfigError.
    """
    if config is None and run:
        own = Path(output_dir or str(RUNS)) / run / CONFIG
        if own.is_file():
            return _as(load(own, overrides), run, output_dir or str(RUNS), own), str(own)
    path, found = _new(config, overrides)
    run, output_dir = run or found.run, output_dir or found.output_dir
    own = Path(output_dir) / run / CONFIG
    if run and own.is_file() and has_begun(own.parent):
        path, found = own, load(own, overrides)
    return _as(found, run, output_dir, path), str(path)


def _as(config: TrainConfig, run: str, output_dir: str, path: Path) -> TrainConfig:
    """The config under that name, in that place."""
    names = [f"run={json.dumps(run)}", f"output_dir={json.dumps(output_dir)}"]
    return _kept_in_a_kernel(named(changed(config, names, str(path)), path))


def has_begun(folder: Path) -> bool:
    """Whether anything of a run was trained."""
    metrics = folder / "metrics.jsonl"
    return (metrics.is_file() and metrics.stat().st_size > 0) or last_checkpoint(folder / "checkpoints") is not None


def _new(config: str | Path | TrainConfig | None, overrides: Sequence[str]) -> tuple[Path, TrainConfig]:
    """What a new run is made from, and what to call it."""
    if isinstance(config, TrainConfig):
        return Path("session.toml"), changed(config, overrides, "the config")
    path = _file(config)
    return path, load(path, overrides)


def _file(config: str | Path | None) -> Path:
    """A config's file: as it is named, or `configs/NAME.toml` of the checkout for a bare name."""
    demo = arguments.demo()
    if config is None:
        return demo
    path = Path(config)
    shipped = demo.with_name(f"{path.name}.toml")
    return shipped if path.parent == Path() and not path.suffix and shipped.is_file() else path


def _kept_in_a_kernel(config: TrainConfig) -> TrainConfig:
    if not in_kernel() or "keep_server_s" in config.server:
        return config
    return msgspec.structs.replace(config, server={**config.server, "keep_server_s": KEEP_SERVER_S})
