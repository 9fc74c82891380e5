"""[grpo]: how the policy learns."""

from typing import Annotated, Any, Literal

import msgspec

from trainer_env.config.sections import Count, Fraction, Natural, NotNegative, Positive, Section, Share

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
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class GrpoConfig(Section, frozen=True, kw_only=True):
    """How the policy learns. Names and meanings as in TRL's GRPOConfig; extra goes to it unchanged."""

    num_generations: Annotated[int, msgspec.Meta(ge=2)] = 8
    per_device_train_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    steps_per_generation: Count | None = None
    """None: gradient_accumulation_steps."""
    num_iterations: Count = 1
    """Times that each generation batch is trained on. More saves sampling, and learns from an older policy."""
    max_steps: Count = 100
    learning_rate: Positive = 1e-5
    lr_scheduler_type: Scheduler = "linear"
    warmup_steps: Natural = 0
    optim: Optimizer = "adamw_torch"
    """The optimizer. 8 bit and paged ones save memory on a GPU; few runs need it, an adapter's states are small."""
    adam_beta1: Fraction = 0.9
    """Decay of Adam's mean of gradients, a step. Seldom worth changing."""
    adam_beta2: Fraction = 0.999
    adam_epsilon: Positive = 1e-8
    """Added to Adam's denominator, against division by 0. Seldom worth changing."""
    weight_decay: NotNegative = 0.0
    """How much the adapter is drawn to 0 in a step, times the learning rate. A little, 0.01, in long runs."""
    max_grad_norm: Positive = 1.0
    """Longer gradients are cut to this norm; lower it, to 0.1 say, when the loss jumps."""
    loss_type: LossType = "dapo"
    beta: NotNegative = 0.0
    epsilon: Positive = 0.2
    epsilon_high: Positive | None = None
    """None: epsilon. "cispo" caps the ratio itself at it, and then None is 5.0."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios of tokens (GRPO), or of whole completions (GSPO), which is steadier for mixtures of experts."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated_completions: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: CorrectionMode = "token_truncate"
    """What is corrected, tokens or whole completions; and whether beyond the limits it is cut to them (truncate) or
    left out (mask).
    """
    vllm_importance_sampling_clip_max: Positive = 3.0
    """The largest ratio of the trainer's probability to the server's that counts in full."""
    vllm_importance_sampling_clip_min: Positive | None = None
    """The smallest one. None: no limit below."""
    temperature: Positive = 1.0
    top_p: Share = 1.0
    """Sample from the likeliest tokens of this total probability. Leave it at 1: less biases the importance ratio."""
    top_k: Natural = 0
    """Sample from so many of the likeliest tokens; 0: all. Leave it at 0: a limit biases the importance ratio."""
    min_p: Fraction = 0.0
    """Drop tokens below this share of the likeliest one's probability. Leave it at 0: else the ratio is biased."""
    max_completion_length: Count = 256
    shuffle_dataset: bool = True
    """Each pass over the examples in an order of its own, from the seed. false keeps theirs, easy ones first say."""
    save_steps: Natural = 0
    """Optimizer steps between two checkpoints; 0: none, but for the one that an interrupted run leaves."""
    save_total_limit: Count = 2
    """Checkpoints that are kept, the newest ones."""
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """Other settings of TRL's GRPOConfig, as in { delta = 2.0 }. Those that Tandem relies on are refused."""

    @property
    def clip_high(self) -> float:
        """epsilon_high, or its default: for "cispo" the one that TRL recommends."""
        return self.epsilon_high or (5.0 if self.loss_type == "cispo" else self.epsilon)

    @property
    def generation_steps(self) -> int:
        """Micro-batches that one generation batch is cut into: steps_per_generation, or its default."""
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def scored_at_once(self) -> int:
        """Completions of one generation batch that one trainer device has scored."""
        return self.per_device_train_batch_size * self.generation_steps

    @property
    def window(self) -> int:
        """Optimizer steps that are taken on one generation batch."""
        return max(1, self.generation_steps * self.num_iterations // self.gradient_accumulation_steps)

    def lookahead(self, max_staleness: int) -> int:
        """Generation batches that may be sampled ahead of the one that trains, within a bound on staleness."""
        return (max_staleness - (self.window - 1)) // self.window
