"""What the trainer's tests share: a tiny model, its policy, and runs of the real trainer on it."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from trainer_env import config as configs
from trainer_env import grpo, models

with warnings.catch_warnings():
    # Before transformers, peft and trl, as in a run. What importing it warns of is not ours to mend.
    warnings.simplefilter("ignore")
    grpo.import_unsloth()

from trainer.hf_server import HFServer

from trainer_env.checkpoints import last_checkpoint, step_of
from trainer_env.data import Example
from trainer_env.publisher import Publisher
from trainer_env.rewards import Reward
from trainer_env.rollouts import Rollouts
from trainer_env.tracking import Tracker

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
TINY = "builtin:tiny-random-llama?scale=8"
EXAMPLES = [Example([{"role": "user", "content": f"What is {x}+{x}?"}], answer=str(2 * x)) for x in range(1, 6)]


def low_tokens(*, completion_ids, **_):
    """The share of tokens from the first half of the vocabulary: about half of them, for a random model."""
    return [sum(token < 24576 for token in ids) / len(ids) for ids in completion_ids]


LOW_TOKENS = Reward("low", low_tokens)


@pytest.fixture(scope="session")
def tiny() -> str:
    return models.resolve(TINY)


@pytest.fixture
def make_config(tmp_path):
    """The demo's config on the tiny model in float32, with small batches, and `key=value` overrides on top."""

    def make(*overrides: str, run: str = "run") -> configs.TrainConfig:
        return configs.load(
            DEMO,
            [
                f'output_dir="{tmp_path}"',
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

    return make


@pytest.fixture
def train(tiny, make_config):
    """Run the real trainer on the tiny model, with `HFServer` for the server; everything that took part."""

    def train(
        *overrides: str,
        server: HFServer | None = None,
        rewards: Sequence[Reward] = (LOW_TOKENS,),
        examples: Sequence[Example] = EXAMPLES,
        run: str = "run",
        **how: Any,
    ) -> SimpleNamespace:
        config = make_config(*overrides, run=run)
        server = server or HFServer(tiny)
        policy = grpo.load_policy(config, tiny)
        rollouts = Rollouts(
            server,
            policy.tokenizer,
            config,
            max_staleness=config.max_staleness("cpu"),
            eos_token_ids=policy.eos_token_ids,
        )
        checkpoint = last_checkpoint(config.run_dir / "checkpoints") if how.get("resume") else None
        tracker = Tracker(
            config.run_dir,
            config.grpo.max_steps,
            display="none",
            samples_per_step=99,
            resume_step=step_of(checkpoint) if checkpoint else None,
        )
        publisher = Publisher(server)
        try:
            outcome = grpo.run(
                policy,
                config,
                examples=examples,
                rewards=rewards,
                rollouts=rollouts,
                publisher=publisher,
                tracker=tracker,
                **how,
            )
        finally:
            tracker.close()
        return SimpleNamespace(
            config=config, server=server, policy=policy, outcome=outcome, steps=tracker.steps, samples=tracker.samples
        )

    return train
