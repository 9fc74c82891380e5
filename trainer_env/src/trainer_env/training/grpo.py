"""Unsloth's policy and TRL's GRPO trainer, fed by the bridge. The only file that imports unsloth and trl."""

import dataclasses
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

from bridge.errors import ConfigError
from trainer_env import ranks
from trainer_env.config import TrainConfig
from trainer_env.data.ordering import training_rows
from trainer_env.models import cache_dir
from trainer_env.models.layers import require_layers
from trainer_env.publishing.publisher import Publisher
from trainer_env.rewards import Reward
from trainer_env.runs.checkpoints import checkpoint_to_resume, save_adapter
from trainer_env.runs.tracking import Tracker
from trainer_env.sampling.rollouts import Rollouts
from trainer_env.training.trl_settings import trl_settings


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run left behind. step: optimizer steps taken, by earlier parts of the run too."""

    step: int
    adapter: Path
    finished: bool


def import_unsloth() -> Any:
    """The unsloth package, with its files in Tandem's cache and nothing sent home. A user's own environment stays.

    To be called before torch is imported, which reads its thread settings then, and before transformers, peft and trl,
    all of which unsloth patches.
    """
    compiled = cache_dir() / "unsloth"
    compiled.mkdir(parents=True, exist_ok=True)
    for name, value in {
        "UNSLOTH_COMPILE_LOCATION": str(compiled / "unsloth_compiled_cache"),
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # On a CPU the engine shares the cores. OpenMP's threads spin while they wait for one another, which takes the
        # core from the one waited for: steps became five to ten times slower.
        "OMP_WAIT_POLICY": "passive",
        # Rows laid end to end are one kernel's work where there is such a kernel. Elsewhere Unsloth attends to them in
        # a loop over their lengths, in each layer: two fifths of a small step (docs/benchmarks.md). Padded they are one
        # call.
        "UNSLOTH_GRPO_SEQ_PACKING": str(int(attends_to_packed_rows())),
    }.items():
        os.environ.setdefault(name, value)
    import unsloth

    return unsloth


def attends_to_packed_rows() -> bool:
    """Whether this environment has a kernel for rows of several lengths laid end to end, as far as Unsloth uses it.

    PyTorch's own takes grouped-query attention from 2.12 on. Imports nothing.
    """
    if any(importlib.util.find_spec(name) for name in ("flash_attn", "xformers")):
        return True
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 12)


def load_policy(config: TrainConfig, model_path: str) -> Policy:
    """The base model with a fresh adapter, on the GPU if this process sees one, else on the CPU.

    model_path: what `models.resolve` returned. The same seed gives the same adapter. Raises ConfigError when the model
    lacks a layer that is to get one.
    """
    FastLanguageModel = import_unsloth().FastLanguageModel  # noqa: N806 (a class)
    import torch

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
    require_layers(lora, [name for name, _ in model.named_modules()], config.model.name)
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
    rewards: Sequence[Reward],
    rollouts: Rollouts,
    publisher: Publisher,
    tracker: Tracker | None,
    resume: bool = False,
    after_step: Callable[[int], None] | None = None,
    enough: Callable[[], bool] | None = None,
    stop: Event | None = None,
) -> Outcome:
    """Train to grpo.max_steps and save the adapter to run_dir/adapter.

    resume: go on from run_dir's last whole checkpoint, exactly: weights, optimizer, prompts, random state, version.
    tracker: of the first of several trainer processes; the others have none. after_step: called with the number of
    steps taken, once their adapter serves. enough: asked at the start, where yes means that no step is taken, and after
    each step, which is then the last. stop: once set in any process, the step that is being taken is the last.
    Raises ConfigError when there is nothing to resume.
    """
    checkpoint = checkpoint_to_resume(config.run_dir / "checkpoints") if resume else None
    trainer = build_trainer(
        policy,
        config,
        rewards=rewards,
        rollouts=rollouts,
        publisher=publisher,
        tracker=tracker,
        after_step=after_step,
        enough=enough,
        stop=stop,
    )
    from trainer_env.training.step_report import Enough

    try:
        with suppress(Enough):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        rollouts.give_up()
    adapter = config.run_dir / "adapter"
    if ranks.rank() == 0:
        save_adapter(policy.model, adapter)
    return Outcome(trainer.state.global_step, adapter, trainer.state.global_step >= config.grpo.max_steps)


def build_trainer(
    policy: Policy,
    config: TrainConfig,
    *,
    rewards: Sequence[Reward],
    rollouts: Rollouts,
    publisher: Publisher,
    tracker: Tracker | None,
    after_step: Callable[[int], None] | None = None,
    enough: Callable[[], bool] | None = None,
    stop: Event | None = None,
) -> Any:
    """TRL's GRPOTrainer (on a GPU: Unsloth's patched one), fed by `rollouts`, publishing through `publisher`."""
    import_unsloth()
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import GRPOTrainer

    from trainer_env.proof.agreement import Agreement
    from trainer_env.proof.prover import Prover
    from trainer_env.rewards.scoring import Scoring
    from trainer_env.runs.report_to import filled_in, variables
    from trainer_env.runs.reporters import Reporters
    from trainer_env.training.step_report import StepReport
    from trainer_env.training.trl_shim import using_sampling_logprobs

    agreement, scoring = Agreement(), Scoring(rewards)
    prover = Prover(
        publisher.server,
        policy.model,
        config.run_dir,
        on_mismatch=config.rollout.on_sync_mismatch,
        tell=tracker.note if tracker else lambda _: None,
        publish_dtype=config.publish_dtype,
        timeout_s=config.rollout.timeout_s,
    )
    report = StepReport(
        model=policy.model,
        rollouts=rollouts,
        publisher=publisher,
        prover=prover,
        agreement=agreement,
        scoring=scoring,
        tracker=tracker,
        after_step=after_step,
        enough=enough,
        stop=stop,
    )
    with filled_in(variables(config)), _all_bits_kept(config):  # Trackers are made with the variables.
        trainer = using_sampling_logprobs(GRPOTrainer)(
            model=policy.model,
            args=_arguments(config, scoring.weights),
            reward_funcs=scoring.functions(),
            train_dataset=training_rows(rollouts.schedule),
            processing_class=policy.tokenizer,
            rollout_func=rollouts,
            callbacks=[report],
        )
    for display in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(display)
    Reporters(config, tracker).take_from(trainer)

    def publish() -> None:
        if trainer.accelerator.is_main_process:
            publisher.publish(trainer.state.global_step, policy.model)

    trainer.use_rollouts(rollouts, agreement, publish, lambda: _untempered(trainer, policy.model.get_base_model()))
    prover.scorer = trainer.untempered_logprobs
    rollouts.observer = prover if trainer.accelerator.is_main_process else None
    return trainer


@contextmanager
def _all_bits_kept(config: TrainConfig) -> Iterator[None]:
    """Unsloth's patched trainer, built in this, computes a float32 model in float32.

    Told neither bf16 nor fp16, it would autocast to one of them, unless the weights are to be bfloat16 as they are.
    """
    name = "UNSLOTH_MIXED_PRECISION"
    before = os.environ.get(name)
    if config.model.dtype == "float32":
        os.environ[name] = "bfloat16"
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


@contextmanager
def _untempered(trainer: Any, base: Any) -> Iterator[None]:
    """Logprobs of the trainer at temperature 1. base: the model under the adapter.

    Unsloth reads the trainer's temperature at each call; TRL has built it into the model's forward.
    """
    from trl.trainer import add_fused_lm_head

    if trainer.temperature == 1:
        yield
        return
    temperature, forward = trainer.temperature, base.forward
    trainer.temperature = 1.0
    add_fused_lm_head(base, cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32)
    try:
        yield
    finally:
        trainer.temperature, base.forward = temperature, forward


def _arguments(config: TrainConfig, reward_weights: list[float]) -> Any:
    """TRL's GRPOConfig. Raises ConfigError when Unsloth's takes a setting for another."""
    import torch
    from trl import GRPOConfig

    settings = trl_settings(
        config,
        reward_weights=reward_weights,
        on_gpu=torch.cuda.is_available(),
        known=[field.name for field in dataclasses.fields(GRPOConfig) if field.init],
    )
    arguments = GRPOConfig(**settings)
    for name in ("per_device_train_batch_size", "steps_per_generation", "num_generations", "loss_type", "beta"):
        if getattr(arguments, name) != settings[name]:
            raise ConfigError(
                f"grpo.{name} was set to {settings[name]!r}, and Unsloth changed it to {getattr(arguments, name)!r}.",
                remedy="Set it to a value that Unsloth takes.",
            )
    return arguments


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
