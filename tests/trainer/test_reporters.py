"""Trackers get TRL's figures and Tandem's, evaluations before, during and after training; each run has a folder."""

import logging
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from bridge.errors import ConfigError
from trainer_env.display import Silent
from trainer_env.runs.records import Sample
from trainer_env.runs.reporters import Reporters

BOARD = 'tracking.report_to=["tensorboard"]'


def scalars(folder):
    """tag -> {step: value} of all event files in a folder."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return {tag: {event.step: event.value for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


def answered(phase, step, reward):
    return [Sample(phase=phase, step=step, version=step, prompt="p", completion="c", reward=reward)]


@pytest.fixture
def evaluating(monkeypatch):
    """Runs evaluate before, in between and after, as a session does; what they show."""
    from trainer import running
    from trainer_env.runs.tracking import Tracker

    display = Noted()

    class Evaluating(Tracker):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.display = display
            self.evaluation("eval_before", 0, answered("eval_before", 0, 0.25), 1.5)

        def step(self, metrics, samples=()):
            super().step(metrics, samples)
            if metrics.step == 1:
                self.evaluation("eval", 1, answered("eval", 1, 0.5), 1.5)

        def close(self):
            self.evaluation("eval_after", 2, answered("eval_after", 2, 0.75), 1.5)
            super().close()

    monkeypatch.setattr(running, "Tracker", Evaluating)
    return display


class Noted(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def test_a_board_holds_the_rewards_and_tandems_figures(train, evaluating, tmp_path):
    done = train(BOARD, "grpo.learning_rate=1e-3")
    folder = done.config.run_dir / "tensorboard"
    assert len(list(folder.rglob("events.out.tfevents.*"))) >= 1
    told = scalars(folder)
    first, second = done.steps
    assert told["train/reward"] == pytest.approx({1: first.reward_mean, 2: second.reward_mean})
    for name in ("ratio_mean", "publish_ms", "rollout_s", "train_s", "staleness", "proof_ms", "generated_tokens"):
        figures = {step.step: getattr(step, name) for step in done.steps}
        assert told[f"train/tandem/{name}"] == pytest.approx(figures, rel=1e-5), name
    assert told["eval/reward"] == {0: 0.25, 1: 0.5, 2: 0.75}
    assert "train/tandem/reward_mean" not in told  # TRL says it as train/reward.
    assert any(str(folder) in note for note in evaluating.notes)
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ
    assert not (tmp_path / "run" / "checkpoints" / "runs").exists()


def test_a_folder_of_ones_own_wins_and_each_run_has_one(train, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    done = train(BOARD, "grpo.max_steps=1", run="first")
    assert scalars(tmp_path / "mine")["train/tandem/ratio_mean"]
    assert not (done.config.run_dir / "tensorboard").exists()
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR")
    done = train(BOARD, "grpo.max_steps=1", run="second")
    assert set(scalars(done.config.run_dir / "tensorboard")["train/reward"]) == {1}


class Wandb(ModuleType):
    """What is used of wandb: one run at a time is open."""

    def __init__(self):
        super().__init__("wandb")
        self.run = None
        self.opened = []

    def init(self, **arguments):
        self.opened.append(arguments)
        self.run = SimpleNamespace(url="https://there", dir="files")

    def finish(self):
        self.run = None


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", made := Wandb())
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return made


def track_with_wandb(config):
    """Begin and end what `train` does, with a callback that asks nothing of wandb."""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    reporters = Reporters(config, None)
    reporters._callbacks["wandb"] = TrainerCallback()
    arguments = SimpleNamespace(run_name=config.run)
    reporters.on_train_begin(arguments, SimpleNamespace(is_world_process_zero=True), None)
    reporters.close()


def test_runs_in_one_process_are_each_their_own_at_weights_and_biases_and_go_on_there(make_config, wandb):
    one, other = make_config(run="one"), make_config(run="other")
    for config in (one, other, one):
        track_with_wandb(config)
    first, second, third = wandb.opened
    assert first == third
    assert first["id"] != second["id"]
    assert (first["project"], first["name"], first["resume"]) == ("tandem", "one", "allow")
    assert (first["dir"], second["dir"]) == (str(one.run_dir), str(other.run_dir))


def test_a_run_of_weights_and_biases_that_is_open_already_is_left_to_who_opened_it(make_config, wandb):
    wandb.init(id="mine")
    track_with_wandb(make_config(run="one"))
    assert wandb.opened == [{"id": "mine"}]


def test_only_the_first_rank_opens_one(make_config, wandb):
    config = make_config(run="one")
    reporters = Reporters(config, None)
    reporters._callbacks["wandb"] = TrainerCallback()
    reporters.on_train_begin(SimpleNamespace(run_name="one"), SimpleNamespace(is_world_process_zero=False), None)
    assert wandb.opened == []


def test_a_tracker_that_fails_on_the_way_does_not_end_the_run(train, monkeypatch, caplog):
    told = []

    def fails(self, args, state, control, logs=None, **kwargs):
        told.append(state.global_step)
        raise OSError("the network is gone")

    monkeypatch.setattr(TensorBoardCallback, "on_log", fails)
    with caplog.at_level(logging.ERROR):
        done = train(BOARD)
    assert [step.step for step in done.steps] == [1, 2]
    assert told == [1]
    assert "the network is gone" in caplog.text


def test_a_tracker_that_does_not_start_says_what_to_do(train, monkeypatch):
    def fails(self, *_, **__):
        raise OSError("no key")

    monkeypatch.setattr(TensorBoardCallback, "on_train_begin", fails)
    with pytest.raises(ConfigError, match="tensorboard does not start") as refused:
        train(BOARD)
    assert "no key" in refused.value.why
    assert "metrics.jsonl" in refused.value.remedy
