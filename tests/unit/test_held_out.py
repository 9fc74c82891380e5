"""What evaluations mean for a run: the best adapter so far, and when training is to end."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_env.config import EvaluationConfig
from trainer_env.evaluation import best_adapter
from trainer_env.evaluation.held_out import HeldOut
from trainer_env.runs.records import Best, Evaluation

REWARDS = st.lists(st.integers(0, 5).map(float), max_size=12)


def evaluation(step, reward, phase=None):
    phase = phase or ("eval" if step else "eval_before")
    return Evaluation(phase=phase, step=step, reward_mean=reward, examples=4, seconds=1.0)


def held_out(*, every=1, patience=0, threshold=0.0, earlier=(), kept=None, **settings):
    config = EvaluationConfig(
        every=every, early_stopping_patience=patience, early_stopping_threshold=threshold, **settings
    )
    return HeldOut(config, earlier=earlier, kept=kept)


def noted(judge, rewards, first=1):
    """At which steps the adapter is kept."""
    return [step for step, reward in enumerate(rewards, first) if judge.note(evaluation(step, reward))]


def test_what_is_better_is_kept():
    judge = held_out()
    assert noted(judge, [0.2, 0.1, 0.2, 0.3, 0.25]) == [1, 4]
    assert judge.best == Best(step=4, reward_mean=0.3, version=4)


def test_the_last_evaluation_may_be_the_best():
    judge = held_out()
    noted(judge, [0.2, 0.1])
    assert judge.note(evaluation(3, 0.9, "eval_after"))
    assert judge.best is not None
    assert judge.best.step == 3


def test_a_gain_within_the_threshold_is_none():
    judge = held_out(threshold=0.125)
    # Small gains add up: what counts is the distance to the reward of the adapter that is kept.
    assert noted(judge, [0.25, 0.375, 0.3, 0.5, 0.6]) == [1, 4]


def test_before_training_there_is_no_adapter_to_keep_and_the_best_one_is_kept_even_below():
    judge = held_out()
    assert not judge.note(evaluation(0, 0.9))
    assert judge.best is None
    assert noted(judge, [0.1, 0.3]) == [1, 2]


@pytest.mark.parametrize("settings", [{"keep_best": False}, {"every": 0}])
def test_nothing_is_kept_without_need(settings):
    judge = held_out(**settings)
    assert noted(judge, [0.1, 0.2]) == []
    assert not judge.note(evaluation(3, 0.9, "eval_after"))
    assert judge.best is None


def test_patience_counts_evaluations_in_a_row():
    judge = held_out(patience=2)
    ended = []
    for step, reward in enumerate([0.2, 0.1, 0.3, 0.3, 0.2], 1):
        judge.note(evaluation(step, reward))
        ended.append(judge.enough)
    assert ended == [False, False, False, False, True]


def test_the_evaluation_before_training_is_what_patience_starts_from():
    judge = held_out(patience=2)
    judge.note(evaluation(0, 0.5))
    noted(judge, [0.4, 0.45])
    assert judge.enough


def test_patience_needs_a_gain_beyond_the_threshold():
    judge = held_out(patience=1, threshold=0.1)
    noted(judge, [0.2, 0.25])
    assert judge.enough


def test_the_evaluation_at_the_end_costs_no_patience():
    judge = held_out(patience=1)
    judge.note(evaluation(1, 0.5))
    judge.note(evaluation(2, 0.1, "eval_after"))
    assert not judge.enough


@given(REWARDS)
def test_without_patience_no_run_ends(rewards):
    judge = held_out()
    noted(judge, rewards)
    assert not judge.enough


@given(REWARDS, st.integers(1, 4))
def test_patience_runs_out_once_the_best_reward_lies_that_far_back(rewards, patience):
    judge = held_out(patience=patience)
    for count in range(1, len(rewards) + 1):
        judge.note(evaluation(count, rewards[count - 1]))
        seen = rewards[:count]
        assert judge.enough == (count - 1 - seen.index(max(seen)) >= patience)


@given(REWARDS, st.data(), st.integers(1, 3), st.sampled_from([0.0, 1.0]))
def test_a_resumed_run_judges_as_one_that_was_never_interrupted(rewards, data, patience, threshold):
    cut = data.draw(st.integers(0, len(rewards)))
    whole = held_out(patience=patience, threshold=threshold)
    first = held_out(patience=patience, threshold=threshold)
    noted(whole, rewards)
    noted(first, rewards[:cut])
    earlier = [evaluation(step, reward) for step, reward in enumerate(rewards[:cut], 1)]
    second = held_out(patience=patience, threshold=threshold, earlier=earlier, kept=first.best)
    noted(second, rewards[cut:], cut + 1)
    assert (second.best, second.bar, second.without) == (whole.best, whole.bar, whole.without)


def test_a_lost_adapter_is_followed_by_the_next_one():
    judge = held_out(earlier=[evaluation(1, 0.5)])
    assert judge.note(evaluation(2, 0.4))


def best_folder(run_dir, step):
    folder = run_dir / "best"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "best.json").write_text(json.dumps({"step": step, "reward_mean": 0.5, "version": step}))
    return folder


@pytest.mark.parametrize("step", [3, 4, 5])
def test_a_resumed_run_keeps_what_was_measured_and_a_new_one_begins_without(tmp_path, step):
    folder = best_folder(tmp_path, step)
    assert best_adapter.restored(tmp_path, resumed=True) == Best(step=step, reward_mean=0.5, version=step)
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert best_adapter.restored(tmp_path, resumed=False) is None
    assert not folder.exists()


def test_an_adapter_of_a_step_that_is_taken_again_stays_until_a_better_one_comes():
    judge = held_out(earlier=[evaluation(1, 0.5)], kept=Best(step=3, reward_mean=0.9, version=3))
    assert noted(judge, [0.6, 0.4, 0.9, 0.95], 2) == [5]
    # Patience goes by what the run has done since: the step that made that adapter is to be taken again.
    assert (judge.bar, judge.without) == (0.95, 0)


def test_an_adapter_that_does_not_say_what_it_is_does_not_survive(tmp_path):
    folder = best_folder(tmp_path, 1)
    (folder / "best.json").write_text('{"step": 1')
    assert best_adapter.read(tmp_path) is None
    assert best_adapter.restored(tmp_path, resumed=True) is None
    assert not folder.exists()
    assert best_adapter.restored(tmp_path, resumed=True) is None


class Model:
    """Saves as a PeftModel does, as far as this is looked at; `fails` as on a full disk."""

    def __init__(self, weights, *, fails=False):
        self._weights, self._fails = weights, fails

    def save_pretrained(self, folder, **_):
        if self._fails:
            raise OSError("no space")
        Path(folder, "adapter_model.safetensors").write_bytes(self._weights)


def test_the_best_adapter_replaces_the_one_before_with_its_description(tmp_path):
    for step, weights in ((2, b"two"), (4, b"four")):
        best_adapter.keep(Model(weights), tmp_path, Best(step=step, reward_mean=step / 10, version=step))
        assert best_adapter.read(tmp_path) == Best(step=step, reward_mean=step / 10, version=step)
        assert (tmp_path / "best" / "adapter_model.safetensors").read_bytes() == weights
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_an_adapter_that_cannot_be_written_leaves_the_one_before(tmp_path):
    before = Best(step=2, reward_mean=0.2, version=2)
    best_adapter.keep(Model(b"two"), tmp_path, before)
    with pytest.raises(OSError, match="no space"):
        best_adapter.keep(Model(b"", fails=True), tmp_path, Best(step=4, reward_mean=0.4, version=4))
    assert best_adapter.read(tmp_path) == before
    assert (tmp_path / "best" / "adapter_model.safetensors").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
