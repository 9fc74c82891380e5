"""What every engine's configuration has in common: intents under native names, the command line, the checks on LoRA."""

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from bridge.errors import ConfigError
from server_env.engines.options import EngineOptions, flags_in

if TYPE_CHECKING:
    from server_env.config import ServerConfig

Options = TypeVar("Options", bound=msgspec.Struct)


def merged(intents: Mapping[str, Any], native: Options) -> Options:
    """The engine's options: what `[server]` means under native names, and over it what the engine's own table says."""
    said = {name: value for name, value in msgspec.structs.asdict(native).items() if value is not None}
    return msgspec.structs.replace(native, **{**intents, **said})


def arguments(
    section: str,
    options: msgspec.Struct,
    installed: EngineOptions | None,
    *,
    negatable: bool,
    reserved: Sequence[str] = (),
) -> list[str]:
    """The command line of resolved options, extra_args last, checked against the engine's own list if there is one.

    section: the table in the user's file, for messages. negatable: whether a switch has a `--no-…` form where the list
    does not say. reserved: flags that Tandem sets itself, each start anew. Raises ConfigError naming the option that
    this version does not have.
    """
    words: list[str] = []
    extra: tuple[str, ...] = ()
    for name, value in msgspec.structs.asdict(options).items():
        if name == "extra_args":
            extra = value
        elif value is not None:
            flags = _words(name, value, installed, negatable)
            if installed:
                installed.check(flags, f"{section}.{name}")
            words += flags
    taken = sorted(set(flags_in(extra)) & set(reserved))
    if taken:
        raise ConfigError(
            f"{section}.extra_args: {taken[0]} is set by Tandem, to another value at each start.",
            remedy="Leave it out. `server.http` offers the engine's HTTP API.",
        )
    if installed:
        installed.check(extra, f"{section}.extra_args")
    return [*words, *extra]


def _words(name: str, value: Any, installed: EngineOptions | None, negatable: bool) -> list[str]:  # noqa: FBT001
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return _switch(flag, value, installed, negatable)
    if isinstance(value, tuple):
        return [flag, *map(str, value)]
    return [flag, str(value)]


def _switch(flag: str, value: bool, installed: EngineOptions | None, negatable: bool) -> list[str]:  # noqa: FBT001
    """A boolean, either way. `no_enable_…` is vLLM's own name for a switch that is on by default."""
    positive = "--" + flag.removeprefix("--no-") if flag.startswith("--no-enable-") else flag
    wanted = value if positive == flag else not value
    if wanted:
        return [positive]
    option = installed.find(positive) if installed else None
    if not (option.negatable if option else negatable or positive != flag):
        return []  # A plain switch: leaving it out is the only way to have it off, and its default.
    return ["--no-" + positive.removeprefix("--")]


def check_adapters(
    server: "ServerConfig", *, enabled: tuple[str, bool | None], at_once: tuple[str, int], held: tuple[str, int]
) -> None:
    """What training would not survive, whatever the engine. Each argument: the native name, and its value.

    at_once, held: versions, without the base model. Raises ConfigError.
    """
    if not enabled[1]:
        raise ConfigError(f"{enabled[0]}: adapters are what is trained here.", remedy="Leave it out.")
    if at_once[1] < server.max_staleness + 2:
        raise ConfigError(
            f"{at_once[0]}: room for {at_once[1]} versions cannot hold max_staleness = {server.max_staleness}.",
            why="The newest version, the stale ones and the one that is being loaded are live at once.",
            remedy=f"Make room for {server.max_staleness + 2} or more, or leave it out.",
        )
    if held[1] <= at_once[1]:
        raise ConfigError(
            f"{held[0]}: {held[1]} must be above the {at_once[1]} versions that can share a batch.",
            why="An adapter that the engine drops is read from disk again at its next use.",
            remedy="Leave it out.",
        )


def check_nodes(
    server: "ServerConfig", *, nnodes: tuple[str, int], rank: tuple[str, int], meets: tuple[str, bool], gpus: int
) -> None:
    """What an engine on several nodes needs. Each argument: the native name, and its value; gpus: of all nodes.

    Raises ConfigError.
    """
    if server.node_rank and rank[1] != server.node_rank:
        raise ConfigError(
            f"{rank[0]}: says {rank[1]}, and server.node_rank (or --node-rank) says {server.node_rank}.",
            remedy=f"Leave {rank[0]} out.",
        )
    if rank[1] >= nnodes[1]:
        raise ConfigError(
            f"server.node_rank: there is no node {rank[1]} of {nnodes[1]}; ranks count from 0.",
            remedy="Set server.nnodes to the number of machines, the same on each.",
        )
    if nnodes[1] == 1:
        return
    if not meets[1]:
        raise ConfigError(
            f"{meets[0]}: is missing, and {nnodes[1]} nodes have to meet somewhere.",
            remedy="Set server.dist_init_addr to host:port of the first node, the same on each.",
        )
    if server.data_parallel > 1:
        raise ConfigError(
            "server.data_parallel: several engines of one server run on one machine, and nnodes is above 1.",
            remedy="Leave one of the two out.",
        )
    if gpus % nnodes[1]:
        raise ConfigError(
            f"server.tensor_parallel: {gpus} GPUs do not spread evenly over {nnodes[1]} nodes.",
            remedy="Make it a multiple of server.nnodes.",
        )
    if not server.spool_dir:
        raise ConfigError(
            "server.spool_dir: is missing, and every node reads the adapters from it.",
            remedy="Set it to a folder that all nodes see under the same name.",
        )


def package_folder(package: str, title: str) -> Path:
    """Where an engine's package lies in this environment; it is not imported. Raises ConfigError."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"This environment has no {title}.",
            why=f"{sys.prefix} is not the environment of the {title} server.",
            remedy=f"bash scripts/setup_envs.sh --only server-{package}",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def installed_version(distributions: Iterable[str]) -> str:
    """The version of the first of these distributions that this environment has; empty when it has none."""
    return next((v for v in map(_version, distributions) if v), "")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compiled_caches(folder: Path) -> dict[str, str]:
    """Variables that keep what torch and Triton compile in a folder of this server's own."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def offline(model: str | None) -> dict[str, str]:
    """Variables that keep the engine from asking a model hub about a model that lies on disk."""
    return {"HF_HUB_OFFLINE": "1"} if Path(model or "").is_dir() else {}
