"""What the trainer's tests share: a tiny model, its config, and runs of the real trainer on it."""

import os
import warnings
from functools import partial
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from trainer_env import models
from trainer_env.training import grpo

with warnings.catch_warnings():
    # Before transformers, peft and trl, as in a run. What importing it warns of is not ours to mend.
    warnings.simplefilter("ignore")
    grpo.import_unsloth()

from trainer import running


@pytest.fixture(scope="session")
def tiny() -> str:
    return models.resolve(running.TINY)


@pytest.fixture
def make_config(tmp_path):
    return partial(running.tiny_config, tmp_path)


@pytest.fixture
def train(make_config):
    """As `running.train`, with overrides for the config."""

    def train(*overrides: str, run: str = "run", **how) -> SimpleNamespace:
        return running.train(make_config(*overrides, run=run), **how)

    return train
