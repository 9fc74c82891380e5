"""The records of a run, as they stand in its files. A None is written as null: the figure does not apply."""

from typing import Literal

import msgspec

Phase = Literal["train", "eval_before", "eval", "eval_after"]
Proof = Literal["agrees", "disagrees", "inconclusive"]


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One line of metrics.jsonl: an optimizer step, counted from 1. Suffixes: _s seconds, _ms milliseconds."""

    step: int
    version: int
    """Adapter version that the step made."""
    staleness: int | None = None
    """Optimizer steps between the oldest version that sampled this batch and the one being trained."""
    reward_mean: float | None = None
    reward_std: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    ratio_mean: float | None = None
    """Mean of exp(trainer's logprob - server's logprob) over completion tokens, before the step, untruncated."""
    dlogp_mean_abs: float | None = None
    """Mean of |trainer's logprob - server's logprob| over the same tokens."""
    grad_norm: float | None = None
    completion_length: float | None = None
    """Mean, in tokens."""
    rollout_s: float | None = None
    """Waiting for completions: less than their sampling took where that began ahead of time."""
    train_s: float | None = None
    publish_ms: float | None = None
    """From the end of the optimizer step until the new version serves."""
    load_ms: float | None = None
    """The engine's share of publish_ms."""
    proof: Proof | None = None
    """Whether the version that sampled this batch, and the batch's ratio, were found to agree with the trainer."""
    proof_ms: float | None = None
    """The trainer's own time for the proof; most of it while completions were sampled anyway."""
    overlap: float | None = None
    """Share of the rollout that ran while the trainer trained, from 0 to 1."""
    sleep_s: float | None = None
    wake_s: float | None = None
    freed_bytes: int | None = None
    generated_tokens: int | None = None
    """Sampled for this step's batch, by all trainer processes."""
    generated_tokens_per_s: float | None = None
    """The same by the seconds that the server took to sample them, waited for or not: how fast it samples."""
    wall_s: float | None = None
    """What the run has taken until then; see Summary.wall_s."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One line of samples.jsonl: a completion as people read it. step: optimizer steps taken when it was recorded."""

    phase: Phase
    step: int
    version: int
    prompt: str
    completion: str
    reward: float
    """The weighted sum of rewards."""
    rewards: dict[str, float] = {}
    """Each reward function's own score."""
    token_ids: list[int] | None = None
    """The sampled tokens of an evaluation: what another implementation of the same adapter must give."""
    answer: str | None = None
    finish_reason: str | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of evaluations.jsonl: the held-out examples answered, each num_generations times."""

    phase: Phase
    step: int
    reward_mean: float
    """Over all answers."""
    examples: int
    seconds: float
    num_generations: int = 1
    """Answers to each example."""
    temperature: float = 0.0
    pass_at: dict[str, float] = {}
    """k -> the chance that one of k answers is right: evaluation.pass_threshold says which are."""


class Best(msgspec.Struct, frozen=True, kw_only=True):
    """best/best.json: the adapter beside it."""

    step: int
    reward_mean: float
    """On the held-out examples."""
    version: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """summary.json: what a run came to. reward_first4, reward_last4: means of the first and last four steps."""

    backend: str
    placement: str
    steps: int
    reward_first4: float | None
    reward_last4: float | None
    eval_before: float | None
    eval_after: float | None
    wall_s: float
    """Of training, evaluations among it, in all processes that the run has had. Of one that was killed: until its last
    step, also of steps that were taken again.
    """
    adapter: str | None
    restarts: int
    """Of engines and servers, under all trainers of the run that came to an end; what a killed one saw is not known."""
    best_step: int | None = None
    """Of the adapter in best/."""
    best_reward: float | None = None
    """That adapter's, on the held-out examples."""
    stopped_early: bool = False
    """Whether evaluation.early_stopping_patience ended training before grpo.max_steps."""
    proof: dict[Proof, int] = {}
    """Steps by verdict."""
