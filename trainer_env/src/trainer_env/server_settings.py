"""What the trainer tells the server half: the user's own tables, completed by what the run already says elsewhere."""

from typing import Any

from trainer_env.config import TrainConfig
from trainer_env.placement import Placement


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
        **placement.server_settings(config.server),
    }
    return {
        "server": filled | config.server,
        "vllm": config.vllm,
        "sglang": config.sglang,
    }
