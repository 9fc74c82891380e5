"""Unsloth's policy and TRL's GRPO trainer, fed by the bridge. The only file that imports unsloth and trl."""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from bridge.errors import ConfigError
from trainer_env.checkpoints import last_checkpoint
from trainer_env.config import TrainConfig
from trainer_env.data import Example
from trainer_env.models import cache_dir
from trainer_env.ordering import order
from trainer_env.publisher import ADAPTER, Publisher
from trainer_env.rewards import Reward
from trainer_env.rollouts import Rollouts
from trainer_env.tracking import Tracker


@dataclass(frozen=True)
class Policy:
    """The base model under its trainable adapter, and its tokenizer. model: a PeftModel."""

    model: Any
    tokenizer: Any

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends a completion, as TRL counts them: the tokenizer's and the model's own."""
        declared = self.model.generation_config.eos_token_id
        declared = [declared] if isinstance(declared, int) else declared or []
        return tuple(dict.fromkeys([self.tokenizer.eos_token_id, *declared]))


@dataclass(frozen=True)
class Outcome:
    """What a run left behind. step: optimizer steps taken, by earlier parts of the run too."""

    step: int
    adapter: Path
    finished: bool


def load_policy(config: TrainConfig, model_path: str) -> Policy:
    """The base model with a fresh adapter, on the GPU if this process sees one, else on the CPU.

    model_path: what `models.resolve` returned. The same seed gives the same adapter.
    """
    _prepare_environment()
    import torch
    from unsloth import FastLanguageModel

    on_gpu = torch.cuda.is_available()
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_path,
        max_seq_length=config.model.max_seq_length,
        dtype=getattr(torch, config.model.dtype),
        load_in_4bit=config.model.load_in_4bit,
        fast_inference=False,
        # Unsloth would otherwise load a quantized upload of its own under another name than the server's.
        use_exact_model_name=True,
        trust_remote_code=config.model.trust_remote_code,
    )
    lora = config.lora
    model = FastLanguageModel.get_peft_model(
        model,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=list(lora.target_modules),
        bias=lora.bias,
        use_rslora=lora.use_rslora,
        init_lora_weights=lora.init_lora_weights,
        # On a CPU memory is plenty and time is not.
        use_gradient_checkpointing=config.model.use_gradient_checkpointing if on_gpu else False,
        random_state=config.seed,
    )
    tokenizer.padding_side = "left"
    _pad_with_a_token_of_its_own(tokenizer)
    return Policy(model, tokenizer)


def run(
    policy: Policy,
    config: TrainConfig,
    *,
    examples: Sequence[Example],
    rewards: Sequence[Reward],
    rollouts: Rollouts,
    publisher: Publisher,
    tracker: Tracker,
    resume: bool = False,
    after_step: Callable[[int], None] | None = None,
    stop: Event | None = None,
) -> Outcome:
    """Train to grpo.max_steps and save the adapter to run_dir/adapter.

    resume: go on from run_dir's last whole checkpoint, exactly: weights, optimizer, prompts, random state, version.
    after_step: called with the number of steps taken, once their adapter serves. stop: once set, the step that is being
    taken is the last. Raises ConfigError when there is nothing to resume.
    """
    checkpoint = last_checkpoint(config.run_dir / "checkpoints") if resume else None
    if resume and checkpoint is None:
        raise ConfigError(
            f"There is no whole checkpoint in {config.run_dir / 'checkpoints'}.",
            remedy="Start a new run, with grpo.save_steps set.",
        )
    trainer = build_trainer(
        policy,
        config,
        examples=examples,
        rewards=rewards,
        rollouts=rollouts,
        publisher=publisher,
        tracker=tracker,
        after_step=after_step,
        stop=stop,
    )
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    adapter = config.run_dir / "adapter"
    save_adapter(policy.model, adapter)
    return Outcome(trainer.state.global_step, adapter, trainer.state.global_step >= config.grpo.max_steps)


def build_trainer(
    policy: Policy,
    config: TrainConfig,
    *,
    examples: Sequence[Example],
    rewards: Sequence[Reward],
    rollouts: Rollouts,
    publisher: Publisher,
    tracker: Tracker,
    after_step: Callable[[int], None] | None = None,
    stop: Event | None = None,
) -> Any:
    """TRL's GRPOTrainer (on a GPU: Unsloth's patched one), fed by `rollouts`, publishing through `publisher`."""
    _prepare_environment()
    import unsloth  # noqa: F401 (before trl: it patches what is imported next)
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import GRPOTrainer

    from trainer_env.agreement import Agreement
    from trainer_env.scoring import Scoring
    from trainer_env.step_report import StepReport
    from trainer_env.trl_shim import using_sampling_logprobs

    agreement, scoring = Agreement(), Scoring(rewards)
    report = StepReport(
        model=policy.model,
        rollouts=rollouts,
        publisher=publisher,
        agreement=agreement,
        scoring=scoring,
        tracker=tracker,
        after_step=after_step,
        stop=stop,
    )
    trainer = using_sampling_logprobs(GRPOTrainer)(
        model=policy.model,
        args=_arguments(config, scoring.weights),
        reward_funcs=scoring.functions(),
        train_dataset=_dataset(config, examples),
        processing_class=policy.tokenizer,
        rollout_func=rollouts,
        callbacks=[report],
    )
    for display in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(display)

    def publish() -> None:
        if trainer.accelerator.is_main_process:
            publisher.publish(trainer.state.global_step, policy.model)

    trainer.use_rollouts(rollouts, agreement, publish)
    return trainer


def _arguments(config: TrainConfig, reward_weights: list[float]) -> Any:
    """TRL's GRPOConfig. What Unsloth gives another default is set here, so that both trainers do the same."""
    import torch
    from trl import GRPOConfig

    grpo = config.grpo
    settings: dict[str, Any] = {
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
        "epsilon_high": grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high,
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
        "dataloader_pin_memory": torch.cuda.is_available(),
        "save_strategy": "steps" if grpo.save_steps else "no",
        "save_steps": grpo.save_steps or 1,
        "save_total_limit": grpo.save_total_limit,
        "eval_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": list(config.tracking.report_to) or "none",
        "disable_tqdm": True,
        "bf16": config.model.dtype == "bfloat16",
        "fp16": config.model.dtype == "float16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": bool(config.model.use_gradient_checkpointing) and torch.cuda.is_available(),
        "torch_empty_cache_steps": None,
        "use_vllm": False,
    }
    arguments = GRPOConfig(**settings, **grpo.extra)
    for name in ("per_device_train_batch_size", "steps_per_generation", "num_generations", "loss_type", "beta"):
        if getattr(arguments, name) != settings[name]:
            raise ConfigError(
                f"grpo.{name} was set to {settings[name]!r}, and Unsloth changed it to {getattr(arguments, name)!r}.",
                remedy="Set it to a value that Unsloth takes.",
            )
    return arguments


def _dataset(config: TrainConfig, examples: Sequence[Example]) -> Any:
    """The whole run's examples in order, as one pass. Rows are looked up late, so that no type changes on the way."""
    from datasets import Dataset

    grpo = config.grpo
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    groups = grpo.per_device_train_batch_size * ranks * grpo.generation_steps // grpo.num_generations
    windows = -(-grpo.max_steps * grpo.gradient_accumulation_steps // (grpo.generation_steps * grpo.num_iterations))
    indices = order(len(examples), groups * windows, seed=config.seed, shuffle=grpo.shuffle_dataset)
    names = sorted({name for example in examples for name in example.row()})

    def rows(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        found = [examples[index].row() for index in batch["example"]]
        return {name: [row.get(name) for row in found] for name in names}

    return Dataset.from_dict({"example": indices}).with_transform(rows)


def save_adapter(model: Any, folder: Path) -> None:
    """Write the trained adapter in PEFT's format, aside and then renamed, in place of an older one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model.save_pretrained(str(aside), selected_adapters=[ADAPTER], save_embedding_layers=False)
        aside.chmod(0o755)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            folder.rename(old / folder.name)
            aside.rename(folder)
            shutil.rmtree(old)
        else:
            aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _prepare_environment() -> None:
    """What unsloth and trl read from the environment as they are imported. A user's own setting stays."""
    compiled = cache_dir() / "unsloth"
    compiled.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "UNSLOTH_COMPILE_LOCATION": str(compiled / "unsloth_compiled_cache"),
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


def _pad_with_a_token_of_its_own(tokenizer: Any) -> None:
    """Pad with a special token that no prompt or completion holds.

    Unsloth's patched trainer tells padding by its id: where that is the end-of-turn token, it would move the ends of
    the turns inside a prompt as well.
    """
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        return
    template = tokenizer.chat_template or ""
    for token in reversed(tokenizer.all_special_tokens):
        if token not in (tokenizer.eos_token, tokenizer.bos_token) and token not in template:
            tokenizer.pad_token = token
            return
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
