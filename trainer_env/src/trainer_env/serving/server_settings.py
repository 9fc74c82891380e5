"""What the trainer tells the server half: the user's own tables, completed by what the run already says elsewhere."""

from typing import Any

import msgspec

from trainer_env.config import TrainConfig
from trainer_env.placement import Placement

STARTUP_TIMEOUT_S = 900.0
"""The server half's own `startup_timeout_s`."""

LOAD_TIMEOUT_S = 120.0
"""The server half's own `load_timeout_s`."""

LONGEST_STALL_S = 300.0
"""`server.stall_timeout_s` at most, unless it is set: it is a third of what a request for completions may take, so that
one whose engine hangs has time left when that has been replaced."""

START_TRIES = 3
"""Starts of an engine, each within startup_timeout_s, before the server half gives up: ports may be taken."""

BEYOND_START_S = 120.0
"""So much longer the server is waited for than it tries, so that its error, which knows more, comes first."""

_OVER = {"startup_timeout_s", "attach_within_s"}
"""Settings of `[server]` that mean nothing to a server which a trainer has reached."""

FILLED_FROM = {
    "server.run_id": "run",
    "server.model": "model.name",
    "server.dtype": "model.dtype",
    "server.trust_remote_code": "model.trust_remote_code",
    "server.seed": "seed",
    "server.context_length": "model.max_seq_length",
    "server.max_lora_rank": "lora.r",
    "server.max_staleness": "rollout.max_staleness and the placement",
    "server.stall_timeout_s": "rollout.timeout_s, a third of it, at least server.load_timeout_s",
    "server.device": "the placement",
    "server.tensor_parallel": "the placement",
    "server.memory_share": "the placement",
    "server.sleep": "the placement",
}
"""Where a setting that the user has left out of `[server]` comes from: a key of the config, or the placement."""


def server_settings(config: TrainConfig, model: str, placement: Placement) -> dict[str, Any]:
    """The content of server.toml. model: what `models.resolve` returned; the rest: config and placement.

    Raises ConfigError when GPUs and engines do not come out even.

    A key that the user set in `[server]` wins over what is filled in here.
    """
    filled: dict[str, Any] = {
        "run_id": config.run,
        "model": model,
        "dtype": config.model.dtype,
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.seed,
        "context_length": config.model.max_seq_length,
        "max_lora_rank": config.lora.r,
        "max_staleness": config.max_staleness(placement.mode),
        "stall_timeout_s": max(min(LONGEST_STALL_S, config.rollout.timeout_s / 3), _load_timeout_s(config)),
        **placement.server_settings(config.server),
    }
    return {
        "server": filled | config.server,
        "vllm": config.vllm,
        "sglang": config.sglang,
    }


def _load_timeout_s(config: TrainConfig) -> float:
    """A load has a limit of its own, which says more than that of a standstill: it must come first."""
    wanted = config.server.get("load_timeout_s", LOAD_TIMEOUT_S)
    return float(wanted) if isinstance(wanted, int | float) else LOAD_TIMEOUT_S


def what_matters(settings: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The part of server.toml that a running server must have been started with to be gone on with, as plain JSON."""
    server = {key: value for key, value in settings["server"].items() if key not in _OVER}
    if "memory_share" not in config.server:
        server.pop("memory_share", None)  # Planned from the memory that is free, and the server itself holds some.
    if "stall_timeout_s" not in config.server:
        server.pop("stall_timeout_s")  # Of the trainer's own limits: no reason to load an engine anew.
    return msgspec.json.decode(msgspec.json.encode({"server": server, config.backend: settings[config.backend]}))


def ready_within_s(config: TrainConfig) -> float:
    """How long a server that is started may take to be ready, before it counts as one that hangs."""
    return START_TRIES * config.server.get("startup_timeout_s", STARTUP_TIMEOUT_S) + BEYOND_START_S
