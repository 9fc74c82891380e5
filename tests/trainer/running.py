"""The real trainer on a tiny model, with `HFServer` for the server. Import unsloth first, through `grpo`."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainer.hf_server import HFServer
from trainer_env import config as configs
from trainer_env import models
from trainer_env.data import Example
from trainer_env.data.ordering import Schedule
from trainer_env.evaluation.run_evaluation import evaluate_run
from trainer_env.publishing.publisher import Publisher
from trainer_env.rewards import Reward
from trainer_env.runs.checkpoints import last_checkpoint, step_of
from trainer_env.runs.tracking import Tracker
from trainer_env.sampling.rollouts import Rollouts
from trainer_env.sampling.sampler import Sampler
from trainer_env.serving.turns import Turns
from trainer_env.training import grpo

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.toml"
TINY = "builtin:tiny-random-llama?scale=8"
EXAMPLES = [Example([{"role": "user", "content": f"What is {x}+{x}?"}], answer=str(2 * x)) for x in range(1, 6)]


def low_tokens(*, completion_ids, **_):
    """The share of tokens from the first half of the vocabulary: about half of them, for a random model."""
    return [sum(token < 24576 for token in ids) / len(ids) for ids in completion_ids]


LOW_TOKENS = Reward("low", low_tokens)


def tiny_config(folder: Path, *overrides: str, run: str = "run") -> configs.TrainConfig:
    """The demo's config on the tiny model in float32, with small batches, and `key=value` overrides on top."""
    return configs.load(
        DEMO,
        [
            f'output_dir="{folder}"',
            f'run="{run}"',
            f'model.name="{TINY}"',
            'model.dtype="float32"',
            "model.max_seq_length=128",
            "grpo.num_generations=4",
            "grpo.per_device_train_batch_size=8",
            "grpo.max_steps=2",
            "grpo.max_completion_length=6",
            *overrides,
        ],
    )


def train(
    config: configs.TrainConfig,
    *,
    server: HFServer | None = None,
    rewards: Sequence[Reward] = (LOW_TOKENS,),
    examples: Sequence[Example] = EXAMPLES,
    turns: Turns | None = None,
    held_out: Sequence[Example] = (),
    **how: Any,
) -> SimpleNamespace:
    """A run to its end; everything that took part. held_out: evaluated on after each step."""
    path = models.resolve(config.model.name)
    server = server or HFServer(path)
    policy = grpo.load_policy(config, path)
    rollouts = Rollouts(
        Sampler(server, policy.tokenizer, config, eos_token_ids=policy.eos_token_ids, turns=turns),
        config,
        Schedule(config, examples),
        max_staleness=config.max_staleness("cpu"),
    )
    checkpoint = last_checkpoint(config.run_dir / "checkpoints") if how.get("resume") else None
    tracker = Tracker(
        config.run_dir,
        config.grpo.max_steps,
        display="none",
        samples_per_step=99,
        resume_step=step_of(checkpoint) if checkpoint else None,
        evaluation=config.evaluation,
    )
    if held_out:
        how |= {
            "after_step": lambda step: evaluate_run(
                config,
                sampler=rollouts.sampler,
                examples=held_out,
                rewards=rewards,
                tracker=tracker,
                model=policy.model,
                phase="eval",
                step=step,
            ),
            "enough": lambda: tracker.held_out.enough,
        }
    try:
        outcome = grpo.run(
            policy,
            config,
            rewards=rewards,
            rollouts=rollouts,
            publisher=Publisher(server),
            tracker=tracker,
            **how,
        )
    finally:
        tracker.close()
    return SimpleNamespace(
        config=config,
        server=server,
        policy=policy,
        outcome=outcome,
        steps=tracker.steps,
        samples=tracker.samples,
        tracker=tracker,
    )
