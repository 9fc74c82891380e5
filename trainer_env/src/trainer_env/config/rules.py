"""Rules between settings, that no single field's type can hold. Each says what is wrong, why, and what to set."""

import math
import string
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.arguments import BACKENDS
from trainer_env.config import TrainConfig
from trainer_env.config.grpo_config import GrpoConfig
from trainer_env.config.trl_fields import grpo_fields, unknown
from trainer_env.training import trl_settings

Problem = tuple[str, str]
"""A dotted key, and what is wrong with it."""

_BIASED = (
    "the server reports logprobs of the full distribution, so a narrowed one biases the importance ratio; "
    "leave it at {neutral} and shape the samples with grpo.temperature"
)
_OWNED = {
    "use_vllm": "Tandem feeds the trainer through its own server",
    "vllm_mode": "Tandem feeds the trainer through its own server",
    "generation_batch_size": "it follows from grpo.steps_per_generation",
    "generation_kwargs": "the server samples; its options are [vllm] and [sglang]",
    "repetition_penalty": "the server samples without it, or the importance ratio would be biased",
    "chat_template_kwargs": "set data.chat_template_kwargs",
    "reward_weights": "set rewards.weight",
    "num_train_epochs": "a run's length is grpo.max_steps",
    "model_init_kwargs": "the model is described by [model]",
    "output_dir": "set output_dir and run at the top of the file",
    "report_to": "set tracking.report_to",
    "seed": "set seed at the top of the file",
    "data_seed": "set seed at the top of the file",
    "bf16": "set model.dtype",
    "fp16": "set model.dtype",
    "gradient_checkpointing": "set model.use_gradient_checkpointing",
    "save_only_model": "--resume needs the optimizer's state as well",
    "ignore_data_skip": "a resumed run goes on with the prompts that its checkpoint has not seen",
    "auto_find_batch_size": "the server's batches are of grpo.per_device_train_batch_size",
    "vllm_importance_sampling_cap": "its present name is grpo.vllm_importance_sampling_clip_max",
}


def check(config: TrainConfig, source: str) -> None:
    """Raise one ConfigError that lists every broken rule. source: what to call the config."""
    _refuse([problem for rule in _RULES for problem in rule(config)], source)


def require_whole_groups(config: TrainConfig, ranks: int, source: str) -> None:
    """Raise ConfigError unless a generation batch of all trainer processes is a whole number of groups."""
    _refuse(list(_groups(config, ranks)), source)


def _refuse(problems: list[Problem], source: str) -> None:
    if problems:
        raise ConfigError("\n".join(f"{source}: {key}: {what}." for key, what in problems))


def _finite(config: TrainConfig) -> Iterator[Problem]:
    """TOML can write nan and inf, and a range check lets nan pass."""
    for key, value in _leaves(msgspec.to_builtins(config), ""):
        if isinstance(value, float) and not math.isfinite(value):
            yield key, f"expected a finite number, got {value}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{index}")
    else:
        yield path, value


def _server(config: TrainConfig) -> Iterator[Problem]:
    if config.backend not in BACKENDS:
        near = nearest(str(config.backend), BACKENDS)
        hint = f" (nearest: {near!r})" if near else ""
        yield "server.backend", f"expected one of {', '.join(BACKENDS)}, got {config.backend!r}{hint}"


def _model(config: TrainConfig) -> Iterator[Problem]:
    model, cpu = config.model, "cpu" in (config.placement.mode, config.placement.accelerator)
    if config.grpo.max_completion_length >= model.max_seq_length:
        yield (
            "grpo.max_completion_length",
            (
                f"expected less than model.max_seq_length ({model.max_seq_length}), which has to hold the prompt as "
                f"well, got {config.grpo.max_completion_length}"
            ),
        )
    if model.load_in_4bit and cpu:
        yield "model.load_in_4bit", "needs a CUDA GPU; set it to false for a run on the CPU"
    if model.dtype == "float16" and cpu:
        yield "model.dtype", "float16 does not train on a CPU; set bfloat16 or float32"


def _lora(config: TrainConfig) -> Iterator[Problem]:
    if config.lora.use_dora:
        yield "lora.use_dora", "neither vLLM nor SGLang can serve DoRA; leave it at false"
    if config.lora.init_lora_weights is False:
        yield "lora.init_lora_weights", "false starts away from the base model, which is version 0; leave it at true"
    if config.lora.bias != "none":
        yield "lora.bias", f"the server cannot serve trained biases; expected 'none', got {config.lora.bias!r}"
    if config.lora.modules_to_save:
        yield "lora.modules_to_save", "the server cannot serve whole modules beside an adapter; leave it empty"
    for name in config.lora.target_modules:
        if name.rpartition(".")[2] in ("lm_head", "embed_tokens"):
            yield "lora.target_modules", f"{name!r} would be trained as a whole, which the server cannot serve"
        elif name == "all-linear":
            yield "lora.target_modules", '\'all-linear\' is no layer; name them, as in ["q_proj", "v_proj"]'


def _sampling(config: TrainConfig) -> Iterator[Problem]:
    grpo = config.grpo
    for name, neutral in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if getattr(grpo, name) != neutral:
            yield f"grpo.{name}", _BIASED.format(neutral=neutral)
    if grpo.loss_type == "luspo" and grpo.importance_sampling_level != "sequence":
        yield "grpo.importance_sampling_level", "loss_type 'luspo' is defined for 'sequence' only"
    whole = grpo.vllm_importance_sampling_correction and grpo.vllm_importance_sampling_mode.startswith("sequence")
    if grpo.loss_type == "vespo" and whole:
        yield "grpo.vllm_importance_sampling_mode", "loss_type 'vespo' takes 'token_truncate' or 'token_mask' only"
    low, high = grpo.vllm_importance_sampling_clip_min, grpo.vllm_importance_sampling_clip_max
    if low is not None and low >= high:
        yield "grpo.vllm_importance_sampling_clip_min", f"expected less than clip_max ({high}), got {low}"


def _scheduler(config: TrainConfig) -> Iterator[Problem]:
    grpo, key = config.grpo, "grpo.extra.lr_scheduler_kwargs"
    given = grpo.extra.get("lr_scheduler_kwargs", {})
    if not isinstance(given, Mapping):
        yield key, f"expected a table, got {given!r}"
        return
    end = given.get("lr_end", 1e-7)
    if grpo.lr_scheduler_type == "polynomial" and (not isinstance(end, float | int) or grpo.learning_rate <= end):
        yield "grpo.learning_rate", f"expected more than {end}, the lr_end at which 'polynomial' ends; set it in {key}"
    elif grpo.lr_scheduler_type == "cosine_with_min_lr" and ("min_lr" in given) == ("min_lr_rate" in given):
        yield (
            key,
            "grpo.lr_scheduler_type 'cosine_with_min_lr' needs either min_lr or min_lr_rate, as in {min_lr = 1e-6}",
        )
    elif grpo.lr_scheduler_type == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield key, "grpo.lr_scheduler_type 'warmup_stable_decay' needs its length, as in {num_decay_steps = 20}"


def _extra(config: TrainConfig) -> Iterator[Problem]:
    owned, others = trl_settings.owned(config), list[str]()
    for key in config.grpo.extra:
        if key in GrpoConfig.__struct_fields__:
            yield f"grpo.extra.{key}", f"set it as grpo.{key}"
        elif key in _OWNED:
            yield f"grpo.extra.{key}", f"cannot be set here: {_OWNED[key]}"
        elif key in owned:
            yield f"grpo.extra.{key}", "cannot be set here: Tandem sets it, and relies on it"
        else:
            others.append(key)
    fields = grpo_fields() if others else frozenset[str]()
    for key in unknown(others, fields):
        near = nearest(key, list(fields))
        hint = f" (nearest: {near!r})" if near else ""
        yield f"grpo.extra.{key}", f"TRL's GRPOConfig has no such setting{hint}"


def _groups(config: TrainConfig, ranks: int) -> Iterator[Problem]:
    grpo = config.grpo
    batch = grpo.per_device_train_batch_size * ranks * grpo.generation_steps
    if batch % grpo.num_generations:
        yield (
            "grpo.per_device_train_batch_size",
            (
                f"a generation batch has {grpo.per_device_train_batch_size} (per_device_train_batch_size) x "
                f"{ranks} (trainer devices) x {grpo.generation_steps} (steps_per_generation) = {batch} completions; "
                f"expected a multiple of num_generations ({grpo.num_generations}), so that groups stay whole"
            ),
        )


def _batches(config: TrainConfig) -> Iterator[Problem]:
    grpo = config.grpo
    yield from _groups(config, len(config.placement.trainer_gpus) or config.placement.trainer_ranks or 1)
    uses, accumulation = grpo.generation_steps * grpo.num_iterations, grpo.gradient_accumulation_steps
    if uses % accumulation and accumulation % uses:
        yield (
            "grpo.steps_per_generation",
            (
                f"steps_per_generation x num_iterations ({uses}) and gradient_accumulation_steps ({accumulation}) do "
                "not divide one another, so a batch would end in the middle of an optimizer step"
            ),
        )
    if grpo.save_steps % grpo.window:
        yield (
            "grpo.save_steps",
            (
                f"expected a multiple of {grpo.window}, the optimizer steps taken on one generation batch, got "
                f"{grpo.save_steps}; a checkpoint in between would sample the rest of its batch anew on resume"
            ),
        )


def _staleness(config: TrainConfig) -> Iterator[Problem]:
    bound, worst = config.rollout.max_staleness, config.grpo.window - 1
    if bound is not None and worst > bound:
        yield (
            "rollout.max_staleness",
            (
                f"a generation batch is used for {config.grpo.window} optimizer steps (steps_per_generation x "
                f"num_iterations / gradient_accumulation_steps), so its last one is {worst} behind; "
                f"expected a bound of at least {worst}, got {bound}"
            ),
        )


def _data(config: TrainConfig) -> Iterator[Problem]:
    data = config.data
    if not data.prompt_column and not data.prompt_template:
        yield "data.prompt_column", "expected the name of a column, or a data.prompt_template"
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(data.prompt_template) if name is not None]
    except ValueError as error:
        yield "data.prompt_template", f"{error}; write a literal brace twice: {{{{ or }}}}"
    else:
        if data.prompt_template and not fields:
            yield "data.prompt_template", "names no column; write a column's name in braces, as in {question}"
    if data.args and not data.source.startswith("verifiers:"):
        yield "data.args", f'only an environment takes arguments; data.source is {data.source!r}, not "verifiers:…"'
    if not data.chat:
        for name in ("system_prompt", "chat_template_kwargs"):
            if getattr(data, name):
                yield f"data.{name}", "has no place in a raw text prompt; set data.chat = true, or leave it out"


def _evaluation(config: TrainConfig) -> Iterator[Problem]:
    evaluation = config.evaluation
    if evaluation.num_generations > 1 and not evaluation.temperature:
        yield (
            "evaluation.num_generations",
            (
                f"{evaluation.num_generations} answers at evaluation.temperature 0 are all alike; set a temperature "
                "above 0, such as grpo.temperature, or num_generations to 1"
            ),
        )
    if evaluation.early_stopping_patience:
        if not evaluation.every:
            yield (
                "evaluation.early_stopping_patience",
                "counts evaluations in between, and there are none; set evaluation.every",
            )
        if not config.data.eval_size:
            yield (
                "evaluation.early_stopping_patience",
                "nothing is held out to evaluate on; set data.eval_size",
            )


def _rewards(config: TrainConfig) -> Iterator[Problem]:
    if not any(reward.weight for reward in config.rewards):
        yield "rewards", "every weight is 0, so there is nothing to learn from"
    seen: set[str] = set()
    for index, reward in enumerate(config.rewards):
        if reward.function == "verifiers" and not config.data.source.startswith("verifiers:"):
            yield f"rewards.{index}.function", 'scores the tasks of data.source = "verifiers:…" only'
        name = reward.name or reward.function
        if name in seen:
            yield f"rewards.{index}.name", f"two rewards are called {name!r}; give one a name of its own"
        seen.add(name)


_RULES = (
    *(_finite, _server, _model, _lora, _sampling, _scheduler, _extra),
    *(_batches, _staleness, _data, _rewards, _evaluation),
)
