"""An evaluation that counts for its run: answered, recorded, and its adapter kept when it is the best so far."""

import time
from collections.abc import Sequence
from typing import Any

from trainer_env.config import TrainConfig
from trainer_env.data import Example
from trainer_env.evaluation import best_adapter, evaluate
from trainer_env.rewards import Reward
from trainer_env.runs.records import Evaluation, Phase
from trainer_env.runs.tracking import Tracker
from trainer_env.sampling.sampler import Sampler


def evaluate_run(
    config: TrainConfig,
    *,
    sampler: Sampler,
    examples: Sequence[Example],
    rewards: Sequence[Reward],
    tracker: Tracker,
    model: Any,
    phase: Phase,
    step: int,
) -> Evaluation:
    """Answer the held-out examples under adapter version `step`, as [evaluation] says. model: holds that adapter.

    Raises what the server answers, RewardError, and OSError or BridgeError when the disk refuses.
    """
    settings = config.evaluation
    examples = examples[: settings.max_examples or None]
    tracker.status(f"evaluating on {len(examples)} held-out examples")
    started = time.monotonic()
    answered = evaluate(
        sampler,
        examples,
        rewards,
        n=settings.num_generations,
        temperature=settings.temperature,
        version=step,
        pass_threshold=settings.pass_threshold,
        phase=phase,
        step=step,
        scored_at_once=config.grpo.scored_at_once,
    )
    sampler.turns.take()  # No part of a step.
    record = tracker.evaluation(
        phase,
        step,
        answered.samples,
        time.monotonic() - started,
        num_generations=answered.num_generations,
        temperature=answered.temperature,
        pass_at=answered.pass_at,
    )
    if tracker.held_out.note(record) and (best := tracker.held_out.best):
        best_adapter.keep(model, config.run_dir, best)
    return record
