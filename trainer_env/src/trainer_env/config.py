"""A run as data: every setting of the trainer half, read from TOML. configs/demo.toml explains them one by one."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bridge.settings import apply_overrides, decode_dict, decode_toml

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

Scheduler = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
Optimizer = Literal[
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_8bit",
    "adamw_bnb_8bit",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "lion_8bit",
    "lion_32bit",
    "adafactor",
    "sgd",
]
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every section: immutable, and a key that it does not know is an error."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The base model, as both halves load it. Names as in Unsloth's FastLanguageModel."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """`builtin:…`, a folder, or a Hugging Face name."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the base weights in both halves. auto: bfloat16, but for a CPU that has no instructions for it: float32."""
    max_seq_length: Annotated[int, msgspec.Meta(ge=2)] = 2048
    """Tokens of prompt and completion together."""
    load_in_4bit: bool = False
    use_gradient_checkpointing: bool | Literal["unsloth"] = "unsloth"
    trust_remote_code: bool = False


class LoraConfig(Section, frozen=True, kw_only=True):
    """The adapter. Names as in PEFT's LoraConfig."""

    r: Count = 16
    lora_alpha: Positive = 32
    lora_dropout: Fraction = 0.0
    target_modules: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    use_rslora: bool = False
    init_lora_weights: bool | Literal["gaussian"] = True
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: tuple[str, ...] = ()


class DataConfig(Section, frozen=True, kw_only=True):
    """Where prompts and answers come from."""

    source: Annotated[str, msgspec.Meta(min_length=1)] = "builtin:arithmetic"
    """`builtin:arithmetic`, a .jsonl, .parquet or .csv file, `verifiers:ENVIRONMENT`, or a Hugging Face name."""
    args: dict[str, Any] = {}
    """What a `verifiers:` environment is configured with."""
    subset: str = ""
    split: str = "train"
    eval_split: str = ""
    eval_size: Natural = 16
    """Examples held out of training, unless eval_split names a split of its own (then: at most so many of it)."""
    max_examples: Natural = 0
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    prompt_template: str = ""
    system_prompt: str = ""
    chat: bool = True
    chat_template_kwargs: dict[str, Any] = {}


class RewardConfig(Section, frozen=True, kw_only=True):
    """One reward function. args go to it as keyword arguments when it is loaded."""

    function: Annotated[str, msgspec.Meta(min_length=1)]
    """A built-in name, `module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    name: str = ""
    timeout_s: Positive = 60.0
    """For one batch of completions."""
    args: dict[str, Any] = {}


class GrpoConfig(Section, frozen=True, kw_only=True):
    """How the policy learns. Names and meanings as in TRL's GRPOConfig; extra goes to it unchanged."""

    num_generations: Annotated[int, msgspec.Meta(ge=2)] = 8
    per_device_train_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    steps_per_generation: Count | None = None
    """None: gradient_accumulation_steps."""
    num_iterations: Count = 1
    max_steps: Count = 100
    learning_rate: Positive = 1e-5
    lr_scheduler_type: Scheduler = "linear"
    warmup_steps: Natural = 0
    optim: Optimizer = "adamw_torch"
    adam_beta1: Fraction = 0.9
    adam_beta2: Fraction = 0.999
    adam_epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    max_grad_norm: Positive = 1.0
    loss_type: LossType = "dapo"
    beta: NotNegative = 0.0
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    """None: epsilon."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated_completions: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: CorrectionMode = "token_truncate"
    vllm_importance_sampling_clip_max: Positive = 3.0
    vllm_importance_sampling_clip_min: Positive | None = None
    temperature: Positive = 1.0
    top_p: Share = 1.0
    top_k: Natural = 0
    min_p: Fraction = 0.0
    max_completion_length: Count = 256
    shuffle_dataset: bool = True
    save_steps: Natural = 0
    """Optimizer steps between two checkpoints; 0: none, but for the one that an interrupted run leaves."""
    save_total_limit: Count = 2
    extra: dict[str, Any] = {}

    @property
    def generation_steps(self) -> int:
        """Micro-batches that one generation batch is cut into: steps_per_generation, or its default."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def window(self) -> int:
        """Optimizer steps that are taken on one generation batch."""
        return max(1, self.generation_steps * self.num_iterations // self.gradient_accumulation_steps)

    def lookahead(self, max_staleness: int) -> int:
        """Generation batches that may be sampled ahead of the one that trains, within a bound on staleness."""
        return (max_staleness - (self.window - 1)) // self.window


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How completions come from the server and adapters go to it. All waits are in seconds."""

    max_staleness: Natural | None = None
    """Optimizer steps that a completion's version may lie behind. None: see TrainConfig.max_staleness."""
    timeout_s: Positive = 300.0
    publish_timeout_s: Positive = 60.0
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    on_sync_mismatch: Literal["stop", "warn"] = "stop"
    """When the proof of sync finds that the server does not compute the policy that is trained."""


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Held-out prompts, answered before, during and after training."""

    before: bool = True
    after: bool = True
    every: Natural = 0
    """Optimizer steps between two evaluations; 0: none in between."""
    max_examples: Natural = 0
    """0: all that are held out."""
    temperature: NotNegative = 0.0
    """0: greedy."""
    num_generations: Count = 1
    """Answers to each example; more than one, with a temperature, give pass@k."""
    pass_threshold: float = 1.0
    """The reward from which on an answer counts as right, for pass@k."""
    keep_best: bool = True
    """Of the evaluations in between, keep the best one's adapter in best/."""
    early_stopping_patience: Natural = 0
    """Evaluations in a row without a better reward after which training ends; 0: it never does."""
    early_stopping_threshold: NotNegative = 0.0
    """By how much a reward must exceed the best one to be better."""


class PlacementConfig(Section, frozen=True, kw_only=True):
    """Which devices each half gets."""

    mode: Literal["auto", "split", "shared", "time-share", "cpu"] = "auto"
    accelerator: Literal["auto", "cuda", "cpu"] = "auto"
    server_gpus: tuple[str | int, ...] = ()
    trainer_gpus: tuple[str | int, ...] = ()
    trainer_gib: NotNegative = 0.0
    """GPU memory that the trainer needs beside an engine on the same GPU; 0: estimated from the model's size."""
    trainer_ranks: Natural = 0
    """Processes that train on the CPU; 0: one. On GPUs there is one for each that trains."""
    server_threads: Natural = 0
    trainer_threads: Natural = 0


class TrackingConfig(Section, frozen=True, kw_only=True):
    """What is shown and kept of a run. metrics.jsonl is always written."""

    report_to: tuple[Tracker, ...] = ()
    display: Literal["auto", "live", "plain", "none"] = "auto"
    samples_per_step: Natural = 2


class TrainConfig(Section, frozen=True, kw_only=True):
    """A whole run. The server, vllm and sglang tables belong to the server half, which checks them itself."""

    model: ModelConfig
    rewards: Annotated[tuple[RewardConfig, ...], msgspec.Meta(min_length=1)]
    seed: Natural = 0
    output_dir: str = "runs"
    run: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")] = ""
    """Folder of the run under output_dir; empty: `named` finds one."""
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    grpo: GrpoConfig = GrpoConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()
    server: dict[str, Any] = {}
    vllm: dict[str, Any] = {}
    sglang: dict[str, Any] = {}

    @property
    def backend(self) -> str:
        """The engine that samples."""
        return self.server.get("backend", "vllm")

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.output_dir) / self.run

    def max_staleness(self, mode: str) -> int:
        """The bound on staleness, in optimizer steps, in a placement mode.

        Without a bound of its own a run gets what re-using its batches needs, and in split mode one batch more, so that
        the server samples while the trainer trains. In time-share the halves take turns: nothing is sampled ahead.
        """
        reuse = self.grpo.window - 1
        if mode == "time-share":
            return reuse
        if self.rollout.max_staleness is not None:
            return self.rollout.max_staleness
        return reuse + (self.grpo.window if mode == "split" else 0)

    def lookahead(self, mode: str) -> int:
        """Generation batches that may be sampled ahead of the one that trains, within the bound on staleness."""
        return self.grpo.lookahead(self.max_staleness(mode))

    @property
    def max_prompt_length(self) -> int:
        """Tokens that a prompt may have, so that the longest completion still fits."""
        return self.model.max_seq_length - self.grpo.max_completion_length


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a run's TOML file, with `key=value` overrides applied. Raises ConfigError."""
    from trainer_env.config_checks import check

    config = decode_toml(path, TrainConfig, overrides)
    check(config, str(path))
    return config


def changed(config: TrainConfig, overrides: Sequence[str], source: str) -> TrainConfig:
    """A config with `key=value` overrides applied, and checked as one that is read. Raises ConfigError."""
    from trainer_env.config_checks import check

    found = decode_dict(apply_overrides(msgspec.to_builtins(config), overrides), TrainConfig, source)
    check(found, source)
    return found


def named(config: TrainConfig, path: Path) -> TrainConfig:
    """The config with a run name: its own, else the config file's and the time, one that is not taken yet."""
    if config.run:
        return config
    stem = f"{path.stem}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{again}" for again in range(2, 100))]
    free = next(name for name in names if not (Path(config.output_dir) / name).exists())
    return msgspec.structs.replace(config, run=free)


def to_toml(config: TrainConfig) -> str:
    """The config as TOML with every default written out. `load` reads it back as an equal config."""
    from trainer_env.toml_writer import write_toml

    return write_toml(msgspec.to_builtins(config))
