"""A run as data: every setting of the trainer half, read from TOML. configs/demo.toml explains most at length."""

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bridge.settings import apply_overrides, decode_dict, decode_toml
from trainer_env.config.grpo_config import GrpoConfig
from trainer_env.config.sections import Count, Fraction, Natural, NotNegative, Positive, Section

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow", "comet_ml", "swanlab"]


class ModelConfig(Section, frozen=True, kw_only=True):
    """The base model, as both halves load it. Names as in Unsloth's FastLanguageModel."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    """`builtin:…`, a folder, or a Hugging Face name."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the base weights in both halves. auto: bfloat16; where none computes it float16 on GPUs, float32 on a CPU."""
    max_seq_length: Annotated[int, msgspec.Meta(ge=2)] = 2048
    """Tokens of prompt and completion together."""
    load_in_4bit: bool = False
    use_gradient_checkpointing: bool | Literal["unsloth"] = "unsloth"
    trust_remote_code: bool = False
    """Run the Python that comes with the model, in both halves, as you. Only for models that need it and you trust."""


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
    """Names of the layers that get an adapter. Fewer train less and load faster; SGLang stacks q, k and v, and gate and
    up: what an adapter lacks of a stack is filled with zeros there.
    """
    use_rslora: bool = False
    """Scale by lora_alpha / sqrt(r) rather than lora_alpha / r; for ranks of 64 and more."""
    init_lora_weights: bool | Literal["gaussian"] = True
    """How the adapter starts, as in PEFT: true, or "gaussian". With either it changes nothing at first."""
    use_dora: bool = False
    """As in PEFT. Neither engine can serve it: leave it at false."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """As in PEFT. The server cannot serve trained biases: leave it at "none"."""
    modules_to_save: tuple[str, ...] = ()
    """As in PEFT. The server cannot serve whole modules: leave it empty."""


class DataConfig(Section, frozen=True, kw_only=True):
    """Where prompts and answers come from."""

    source: Annotated[str, msgspec.Meta(min_length=1)] = "builtin:arithmetic"
    """`builtin:arithmetic`, a .jsonl, .parquet or .csv file, `verifiers:ENVIRONMENT`, or a Hugging Face name."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    """What a `verifiers:` environment is configured with."""
    subset: str = ""
    """The configuration of a data set on the hub, where it has several."""
    split: str = "train"
    """The part of a data set on the hub that is trained on."""
    eval_split: str = ""
    """Held-out examples of their own: a split on the hub, else a file. Empty: they are taken out of training."""
    eval_size: Natural = 16
    """Examples held out of training, unless eval_split names a split of its own (then: at most so many of it)."""
    max_examples: Natural = 0
    """Train on the first so many examples only; 0: all. For a quick try."""
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    prompt_template: str = ""
    system_prompt: str = ""
    filter_overlong_prompts: bool = False
    """Leave out prompts above model.max_seq_length - grpo.max_completion_length tokens, rather than refuse them."""
    chat: bool = True
    """Put prompts into the model's chat template. false sends them as they are, for models without one."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the chat template is given besides, such as { enable_thinking = false }."""


class RewardConfig(Section, frozen=True, kw_only=True):
    """One reward function. args go to it as keyword arguments when it is loaded."""

    function: Annotated[str, msgspec.Meta(min_length=1)]
    """A built-in name, `module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    """Its factor in the sum that is maximized. Below 0 punishes; 0 only shows it in metrics and samples."""
    name: str = ""
    timeout_s: Positive = 60.0
    """For one batch of completions. An evaluation is scored in as many as it takes."""
    args: dict[str, Any] = msgspec.field(default_factory=dict)


class RolloutConfig(Section, frozen=True, kw_only=True):
    """How completions come from the server and adapters go to it. All waits are in seconds."""

    max_staleness: Natural | None = None
    """Optimizer steps that a completion's version may lie behind. None: see TrainConfig.max_staleness."""
    timeout_s: Positive = 300.0
    """For the completions of one generation batch. An evaluation has as many of these as it would fill batches."""
    publish_timeout_s: Positive = 60.0
    """Seconds that the server may take to load one adapter; raise it for high ranks on slow disks."""
    publish_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the adapter's tensors on their way; see TrainConfig.publish_dtype."""
    on_sync_mismatch: Literal["stop", "warn"] = "stop"
    """When the proof of sync finds that the server does not compute the policy that is trained."""


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Held-out prompts, answered before, during and after training."""

    before: bool = True
    """Answer the held-out examples with the base model first. false starts sooner, with nothing to compare with."""
    after: bool = True
    """Answer them with what training ended with."""
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
    """auto: what the machine has; cuda: refuse to run without a GPU; cpu: leave GPUs alone."""
    server_gpus: tuple[str | int, ...] = ()
    trainer_gpus: tuple[str | int, ...] = ()
    """As server_gpus, for the trainer: one process on each. Empty: those that the server leaves."""
    trainer_gib: NotNegative = 0.0
    """GPU memory that the trainer needs beside an engine on the same GPU; 0: estimated from the model's size."""
    trainer_ranks: Natural = 0
    """Processes that train on the CPU; 0: one. On GPUs there is one for each that trains, and no other number."""
    server_threads: Natural = 0
    """Threads of the engine; 0: on a CPU half the cores when both halves work at once, else its own default."""
    trainer_threads: Natural = 0
    """Threads of each trainer process; 0: on a CPU its share of the cores that the engine leaves."""


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
    server: dict[str, Any] = msgspec.field(default_factory=dict)
    """The server half's own: which engine, its limits and waits. `config show server` lists them."""
    vllm: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of vLLM, under its own names. `config show vllm` lists them; docs/backends.md has those of Tandem."""
    sglang: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of SGLang, under its own names. `config show sglang` lists them; docs/backends.md has those of Tandem."""

    @property
    def backend(self) -> str:
        """The engine that samples."""
        return self.server.get("backend", "vllm")

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return Path(self.output_dir) / self.run

    @property
    def publish_dtype(self) -> str:
        """Of the adapter's tensors on their way to the server. "auto": bfloat16 to an engine that computes in it.

        Both engines round an adapter to their own dtype when they load it: float32 would be twice the bytes and the
        same policy.
        """
        if self.rollout.publish_dtype != "auto":
            return self.rollout.publish_dtype
        own = self.vllm if self.backend == "vllm" else self.sglang
        by_hand = any(str(word).startswith(("--dtype", "--lora-dtype")) for word in own.get("extra_args", ()))
        dtype = own.get("dtype") or self.server.get("dtype") or self.model.dtype
        return "bfloat16" if dtype == "bfloat16" and not by_hand else "float32"

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
        """Tokens that a prompt may have, so that the longest completion still fits, in the server too."""
        served = self.server.get("context_length")
        context = min(self.model.max_seq_length, served) if isinstance(served, int) else self.model.max_seq_length
        return context - self.grpo.max_completion_length


def load(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read and check a run's TOML file, with `key=value` overrides applied. Raises ConfigError."""
    from trainer_env.config.rules import check

    config = decode_toml(path, TrainConfig, overrides)
    check(config, str(path))
    return config


def changed(config: TrainConfig, overrides: Sequence[str], source: str) -> TrainConfig:
    """A config with `key=value` overrides applied, and checked as one that is read. Raises ConfigError."""
    from trainer_env.config.rules import check

    found = decode_dict(apply_overrides(msgspec.to_builtins(config), overrides), TrainConfig, source)
    check(found, source)
    return found


def named(config: TrainConfig, path: Path) -> TrainConfig:
    """The config with a run name: its own, else the config file's and the time, one that is not taken yet.

    Of the file's name, what a run may be called: `load` has to read the run's own config.
    """
    if config.run:
        return config
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "run"
    stem = f"{plain}-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    names = [stem, *(f"{stem}-{again}" for again in range(2, 100))]
    free = next(name for name in names if not (Path(config.output_dir) / name).exists())
    return msgspec.structs.replace(config, run=free)


def to_toml(config: TrainConfig) -> str:
    """The config as TOML with every default written out. `load` reads it back as an equal config."""
    from trainer_env.config.toml_writer import write_toml

    return write_toml(msgspec.to_builtins(config))
