"""Which saved adapter a server has yet to be given for a version that is asked for."""

import json
import shutil

import msgspec
import pytest

from bridge.errors import ConfigError
from bridge.protocol import ServerStatus
from trainer_env.publishing.saved_adapter import Saved, in_the_way, missing, must_begin_anew
from trainer_env.runs.checkpoints import NEEDED
from trainer_env.runs.records import Best, StepMetrics, Summary


class Run:
    """A run's folder. Each adapter's weights are the text that it is given."""

    def __init__(self, folder):
        self.folder = folder

    def checkpoint(self, step, weights=None):
        folder = self.folder / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for name in NEEDED:
            (folder / name).write_text(json.dumps({"global_step": step}))
        return self._adapter(folder, step, weights)

    def final(self, step, weights=None):
        summary = Summary(
            backend="vllm",
            placement="cpu",
            steps=step,
            reward_first4=None,
            reward_last4=None,
            eval_before=None,
            eval_after=None,
            wall_s=1.0,
            adapter=None,
            restarts=0,
        )
        (self.folder / "summary.json").write_bytes(msgspec.json.encode(summary))
        return self._adapter(self.folder / "adapter", step, weights)

    def best(self, step, weights=None):
        saved = self._adapter(self.folder / "best", step, weights)
        best = Best(step=step, reward_mean=0.9, version=step)
        (saved.folder / "best.json").write_bytes(msgspec.json.encode(best))
        return saved

    def took(self, steps):
        lines = [msgspec.json.encode(StepMetrics(step=step, version=step)) for step in range(1, steps + 1)]
        (self.folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")

    def status(self, newest, loaded=()):
        return ServerStatus(
            engine="",
            engine_version="",
            engine_pid=0,
            version=newest,
            loaded=loaded or ((newest,) if newest else ()),
            in_use={},
            restarts=0,
            requests=0,
            generated_tokens=0,
            dropped_frames=0,
            uptime_s=0.0,
        )

    def missing(self, version, newest=0, loaded=(), **how):
        status = self.status(newest, loaded)
        found = missing(status, self.folder, version, **how)
        return found and (found, must_begin_anew(status, found))

    def _adapter(self, folder, step, weights):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_text(weights or f"weights {step}")
        (folder / "adapter_config.json").write_text("{}")
        return Saved(folder, step)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_the_newest_is_the_newest_checkpoint_or_what_training_ended_with(run):
    run.took(24)
    best = run.best(10)
    assert run.missing(-1) == (best, False)
    final = run.final(24)
    assert run.missing(-1) == (final, False)
    run.checkpoint(20)
    assert run.missing(-1) == (final, False)
    later = run.checkpoint(30)  # It went on, and was killed.
    assert run.missing(-1) == (later, False)
    assert run.missing(-1, newest=30) is run.missing(-1, newest=31) is None


def test_a_run_that_trained_and_saved_nothing_has_no_newest_and_the_base_model_does_not_pass_for_it(run):
    assert run.missing(-1) is None  # It has not trained: the base model is what there is.
    run.took(3)
    with pytest.raises(ConfigError, match="taken 3 optimizer steps, and no adapter of it is saved") as refused:
        run.missing(-1)
    assert "--version base" in refused.value.remedy
    assert run.missing(0) is None
    assert run.missing(-1, newest=3) is None  # A server that was left has it.


def test_a_saved_version_that_is_not_loaded_is_given_anew_when_the_server_has_newer_ones(run):
    run.took(40)
    best, final = run.best(10), run.final(40)
    assert run.missing(10, newest=40) == (best, True)
    assert run.missing(10, newest=40, loaded=(10, 40)) is None
    assert run.missing(10) == (best, False)
    assert run.missing(40, newest=10) == (final, False)
    assert run.missing(0, newest=40) is None
    assert run.missing(20, newest=40) is None  # The server says that it does not hold it.
    with pytest.raises(ConfigError, match="no adapter version 41"):
        run.missing(41, newest=40)


def test_while_the_run_trains_nothing_takes_the_place_of_what_training_publishes(run):
    run.took(20)
    run.best(30)
    checkpoint = run.checkpoint(20)
    run.final(24)
    assert run.missing(-1, newest=22, may_come=True) is run.missing(30, newest=22, may_come=True) is None
    assert run.missing(20, newest=22, may_come=True) is run.missing(24, newest=22, may_come=True) is None
    assert run.missing(-1, may_come=True) == (checkpoint, False)


def test_a_best_adapter_of_a_later_step_does_not_pass_for_the_last_one(run):
    run.took(22)
    best, last = run.best(25), run.checkpoint(22)
    assert run.missing(25, newest=22) == (best, False)
    assert run.missing(-1, newest=25, given=best) == (last, True)
    assert run.missing(-1, newest=25) == (last, True)  # No step 25 has been recorded.


def test_a_step_that_was_taken_again_is_not_taken_for_the_best_adapter_of_that_step(run):
    run.took(25)
    best, last = run.best(25, "first"), run.final(25, "again")
    assert run.missing(25) == (best, False)
    assert run.missing(-1, newest=25, given=best) == (last, True)
    assert run.missing(25, newest=25, given=last) == (best, True)
    assert run.missing(25, newest=25, given=best) is run.missing(-1, newest=25, given=last) is None


def test_a_best_adapter_that_is_the_last_one_is_given_once(run):
    run.took(25)
    best, last = run.best(25), run.final(25)
    assert run.missing(25, newest=25, given=last) is run.missing(-1, newest=25, given=best) is None


def test_a_checkpoint_that_was_given_and_is_gone_since_is_not_looked_for(run):
    run.took(20)
    given = run.checkpoint(20)
    assert run.missing(-1) == (given, False)
    run.took(100)
    best = run.best(20)
    run.checkpoint(100)
    shutil.rmtree(given.folder)  # grpo.save_total_limit says how many are kept.
    assert run.missing(20, newest=100, given=given) == (best, True)


def test_a_run_goes_on_in_a_new_epoch_when_the_server_has_newer_or_other_weights(run):
    run.checkpoint(15, "again")

    def anew(newest):
        return in_the_way(run.status(newest), run.folder, 15)

    assert [anew(version) for version in (0, 14, 15, 16)] == [False, False, False, True]
    run.best(15, "the first time")
    assert [anew(version) for version in (0, 14, 15, 16)] == [False, False, True, True]
    run.best(15, "again")
    assert not anew(15)
    run.best(10, "the first time")
    assert not anew(15)


@pytest.mark.parametrize("left", [Run.checkpoint, Run.final])
def test_a_server_that_has_a_step_as_it_was_taken_again_is_given_the_best_adapter_of_that_step(run, left):
    run.took(25)
    best = run.best(25, "the first time")
    assert run.missing(25, newest=25) is None  # Training left nothing that says otherwise.
    last = left(run, 25, "again")
    assert run.missing(25, newest=25) == run.missing(25, newest=26, loaded=(25, 26)) == (best, True)
    assert run.missing(-1, newest=25) == (last, True)  # Somebody may have asked for the best one before.
    assert run.missing(25, newest=25, given=best) is run.missing(-1, newest=25, given=last) is None
    best = run.best(25, "again")
    assert run.missing(25, newest=25) is None
