"""Rewards as TRL calls them: one after the other with the same batch, while they run together."""

import threading

import pytest

from trainer_env.rewards import Reward
from trainer_env.rewards.reward_errors import RewardError
from trainer_env.rewards.scoring import Scoring, readable_answer


def as_trl_does(scoring, prompts, completions, **columns):
    """Call each function in turn, with what TRL adds."""
    return [
        function(prompts=prompts, completions=completions, trainer_state=object(), log_metric=print, **columns)
        for function in scoring.functions()
    ]


def test_the_first_call_of_a_batch_runs_every_reward_and_the_others_find_theirs():
    barrier, calls = threading.Barrier(2), []

    def reward(name):
        def function(*, completions, answer, **columns):
            assert set(columns) == {"prompts"}
            calls.append(name)
            barrier.wait(20)
            return [float(text == target) for text, target in zip(completions, answer, strict=True)]

        return Reward(name, function, weight=2.0)

    scoring = Scoring([reward("a"), reward("b")])
    prompts, completions = ["p", "q"], ["x", "y"]
    assert [function.__name__ for function in scoring.functions()] == ["a", "b"]
    assert as_trl_does(scoring, prompts, completions, answer=["x", "x"]) == [[1.0, 0.0], [1.0, 0.0]]
    assert sorted(calls) == ["a", "b"]
    # The same lists again are another batch: its columns may differ.
    assert as_trl_does(scoring, prompts, completions, answer=["y", ["y"]]) == [[0.0, 0.0], [0.0, 0.0]]
    assert as_trl_does(scoring, prompts, ["x", "x"], answer=["x", "x"]) == [[1.0, 1.0], [1.0, 1.0]]
    assert sorted(calls) == ["a", "a", "a", "b", "b", "b"]
    samples = scoring.samples(3, [2, 2])
    assert [(sample.completion, sample.reward, sample.rewards) for sample in samples] == [
        ("x", 4.0, {"a": 1.0, "b": 1.0}),
        ("x", 4.0, {"a": 1.0, "b": 1.0}),
    ]


def test_a_batch_that_failed_leaves_nothing_for_the_next():
    fails = [True]

    def function(*, completions, **_):
        if fails[0]:
            raise ValueError("once")
        return [5.0] * len(completions)

    scoring = Scoring([Reward("a", function), Reward("b", lambda **_: [1.0])])
    prompts, completions = ["p"], ["x"]
    with pytest.raises(RewardError, match="'a' raised ValueError: once"):
        as_trl_does(scoring, prompts, completions)
    fails[0] = False
    assert as_trl_does(scoring, prompts, completions) == [[5.0], [1.0]]


def test_several_accepted_answers_are_one_text_in_a_sample():
    assert readable_answer(["5", "five"]) == "5 | five"
    assert readable_answer("5") == "5"
    assert readable_answer(None) is None
    assert readable_answer([1, {"a": 2}]) == "1 | {'a': 2}"
    assert readable_answer({"a": "b"}) == "{'a': 'b'}"
    assert readable_answer("\ud83d") == r"\ud83d"


def test_a_column_may_be_called_as_the_rewards_are_in_the_code():
    scoring = Scoring([Reward("paid", lambda *, rewards, **_: rewards)])
    assert as_trl_does(scoring, ["p", "q"], ["x", "y"], rewards=[0.5, 1.0]) == [[0.5, 1.0]]
