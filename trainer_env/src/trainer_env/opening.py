"""From what people write to a Session: a config file, or the name of a run, and what this machine has."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

import msgspec

from bridge.errors import ConfigError
from trainer_env import arguments
from trainer_env.config import TrainConfig, load, named
from trainer_env.config_checks import require_whole_groups
from trainer_env.devices import detect
from trainer_env.display import in_kernel
from trainer_env.models import weights_bytes
from trainer_env.placement import Placement, plan

if TYPE_CHECKING:
    from trainer_env.session import Session

S = TypeVar("S", bound="Session")
_opened: "WeakValueDictionary[Path, Session]" = WeakValueDictionary()
"""Sessions that were opened by hand in this process, by their run's folder."""

KEEP_SERVER_S = 900.0
"""How long a notebook's server waits for the next kernel, unless the config says otherwise."""


def opened(
    make: type[S], config: str | Path | TrainConfig | None, overrides: Sequence[str], *, run: str, output_dir: str
) -> S:
    """A session that has started; see `Session.open`. One of the same run that is open in this process makes way."""
    found, source = find(config, overrides, run=run, output_dir=output_dir)
    folder = found.run_dir.resolve()
    if earlier := _opened.get(folder):
        earlier.make_way()
    session = make(found, place_in_one_process(found, source), source=source, by_hand=True)
    try:
        session.start()
    except BaseException:
        session.close(now=True)
        raise
    _opened[folder] = session
    return session


def place(config: TrainConfig, source: str) -> Placement:
    """Which half gets what on this machine. source: what errors call the config. Raises ConfigError."""
    placement = plan(
        config.placement,
        detect(),
        overlap=config.lookahead("cpu") > 0,
        server=config.server,
        model_bytes=weights_bytes(config.model.name),
    )
    require_whole_groups(config, placement.ranks, source)
    return placement


def place_in_one_process(config: TrainConfig, source: str) -> Placement:
    """The same where there is one process, as in a notebook. Raises ConfigError."""
    placement = place(config, source)
    if placement.ranks > 1:
        raise ConfigError(
            f"{source}: this run trains in {placement.ranks} processes, one a GPU, and here is one.",
            remedy="Start it with scripts/train.py, or name one GPU: placement.trainer_gpus=[1].",
        )
    return placement


def find(
    config: str | Path | TrainConfig | None, overrides: Sequence[str], *, run: str = "", output_dir: str = ""
) -> tuple[TrainConfig, str]:
    """The config of a session that is opened by hand, and what errors call it.

    config: what a new run is made from: a file, a TrainConfig, the bare name of one that comes with Tandem, or None for
    the demo. A run that exists has a config of
    its own, which holds instead; the overrides are applied to either. output_dir: default: the config's.
    Raises ConfigError.
    """
    path, found = None, None
    if not (run and output_dir):
        path, found = _new(config, overrides)
        output_dir = output_dir or found.output_dir
    own = Path(output_dir) / run / "config.toml"
    if run and own.is_file():
        path, found = own, load(own, overrides)
    elif path is None or found is None:
        path, found = _new(config, overrides)
    found = msgspec.structs.replace(found, run=run or found.run, output_dir=output_dir)
    return _kept_in_a_kernel(named(found, path)), str(path)


def _new(config: str | Path | TrainConfig | None, overrides: Sequence[str]) -> tuple[Path, TrainConfig]:
    """What a new run is made from, and what to call it."""
    if isinstance(config, TrainConfig):
        return Path("session.toml"), config
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
