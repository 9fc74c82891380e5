"""A run's config as arguments of TRL's GRPOConfig.

Unsloth's patched GRPOConfig has other defaults than TRL's for many of them (optim, warmup, beta, weight decay, the
importance-sampling correction, …), so each is set, and both trainers do the same.
"""

import os
from collections.abc import Collection
from typing import Any

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.config import TrainConfig
from trainer_env.runs.report_to import PROJECT


def trl_settings(
    config: TrainConfig, *, reward_weights: list[float], on_gpu: bool, known: Collection[str]
) -> dict[str, Any]:
    """Keyword arguments for GRPOConfig, grpo.extra among them.

    reward_weights: one a reward function, in their order. known: the names that GRPOConfig takes. Raises ConfigError
    for an extra setting that GRPOConfig does not know, or that a run relies on.
    """
    settings = _settings(config, reward_weights, on_gpu=on_gpu)
    for name in config.grpo.extra:
        if name in settings:
            raise ConfigError(
                f"grpo.extra.{name} cannot be set.", why=f"Tandem sets it, to {settings[name]!r}, and relies on it."
            )
        if name not in known:
            near = nearest(name, list(known))
            raise ConfigError(
                f"grpo.extra.{name}: TRL's GRPOConfig has no such setting.",
                remedy=f"Did you mean {near!r}?" if near else "Its documentation lists what there is.",
            )
    return {**settings, **config.grpo.extra}


def owned(config: TrainConfig) -> Collection[str]:
    """The names of GRPOConfig that Tandem sets, and grpo.extra must not."""
    return _settings(config, [], on_gpu=False).keys()


def _settings(config: TrainConfig, reward_weights: list[float], *, on_gpu: bool) -> dict[str, Any]:
    grpo = config.grpo
    return {
        "output_dir": str(config.run_dir / "checkpoints"),
        "run_name": config.run,
        "seed": config.seed,
        "data_seed": config.seed,
        "reward_weights": reward_weights,
        "num_generations": grpo.num_generations,
        "per_device_train_batch_size": grpo.per_device_train_batch_size,
        "gradient_accumulation_steps": grpo.gradient_accumulation_steps,
        "steps_per_generation": grpo.generation_steps,
        "num_iterations": grpo.num_iterations,
        "max_steps": grpo.max_steps,
        "learning_rate": grpo.learning_rate,
        "lr_scheduler_type": grpo.lr_scheduler_type,
        "warmup_steps": grpo.warmup_steps,
        "optim": grpo.optim,
        "adam_beta1": grpo.adam_beta1,
        "adam_beta2": grpo.adam_beta2,
        "adam_epsilon": grpo.adam_epsilon,
        "weight_decay": grpo.weight_decay,
        "max_grad_norm": grpo.max_grad_norm,
        "loss_type": grpo.loss_type,
        "beta": grpo.beta,
        "epsilon": grpo.epsilon,
        "epsilon_high": grpo.clip_high,
        "importance_sampling_level": grpo.importance_sampling_level,
        "scale_rewards": grpo.scale_rewards,
        "mask_truncated_completions": grpo.mask_truncated_completions,
        "vllm_importance_sampling_correction": grpo.vllm_importance_sampling_correction,
        "vllm_importance_sampling_mode": grpo.vllm_importance_sampling_mode,
        "vllm_importance_sampling_clip_max": grpo.vllm_importance_sampling_clip_max,
        "vllm_importance_sampling_clip_min": grpo.vllm_importance_sampling_clip_min,
        "temperature": grpo.temperature,
        "top_p": grpo.top_p,
        "top_k": grpo.top_k,
        "min_p": grpo.min_p,
        "max_completion_length": grpo.max_completion_length,
        # The order is made in advance: see ordering.py.
        "shuffle_dataset": False,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": on_gpu,
        "save_strategy": "steps" if grpo.save_steps else "no",
        "save_steps": grpo.save_steps or 1,
        "save_total_limit": grpo.save_total_limit,
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": list(config.tracking.report_to) or "none",
        "project": os.environ.get("TRACKIO_PROJECT", PROJECT),
        "disable_tqdm": True,
        "bf16": config.model.dtype == "bfloat16",
        "fp16": config.model.dtype == "float16",
        "use_cpu": not on_gpu,
        "gradient_checkpointing": bool(config.model.use_gradient_checkpointing) and on_gpu,
        "torch_empty_cache_steps": None,
        "use_vllm": False,
    }
