"""Rewards that the data cannot feed: refused before a run, naming the function and the column or the example."""

import json

import pytest

from bridge.errors import ConfigError
from trainer_env import arguments, config, rewards
from trainer_env.config import RewardConfig
from trainer_env.data import Data, Example
from trainer_env.placement import Placement
from trainer_env.rewards.columns_check import check_columns
from trainer_env.session import Session

EXAMPLES = [Example("1+1?", "2", {"level": 1}), Example([{"role": "user", "content": "2+2?"}], "4", {"level": 2})]


def check(function, train=EXAMPLES, held_out=(), **args):
    configs = [RewardConfig(function="length", args={"target": 9}), RewardConfig(function=function, args=args)]
    check_columns(configs, rewards.load(configs), Data(list(train), list(held_out)))


def refusal(function, *given, **args):
    with pytest.raises(ConfigError) as refused:
        check(function, *given, **args)
    return str(refused.value)


@pytest.fixture
def own(tmp_path):
    def write(parameters):
        path = tmp_path / "mine.py"
        path.write_text(f"def pay({parameters}):\n    return [0.0] * len(completions)\n")
        return f"{path}:pay"

    return write


@pytest.mark.parametrize(
    "parameters",
    [
        "prompts, completions, **columns",
        "completions, level, answer, finish_reason, completion_ids, **_",
        "completions, prompts, level, answer, finish_reason, completion_ids",
        "completions, weight=1.0, **_",
    ],
)
def test_a_function_that_can_be_called_is_taken(own, parameters):
    check(own(parameters))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("completions, answer", "unexpected keyword argument 'prompts'"),
        ("completions, levle, **_", "missing a required argument: 'levle'"),
        ("completions, trainer_state, **_", "missing a required argument: 'trainer_state'"),
        ("completions, /, **_", "completions"),
    ],
)
def test_a_function_that_cannot_be_called_is_named_with_what_it_would_be_given(own, parameters, expected):
    place = own(parameters)
    message = refusal(place)
    assert f"rewards.1.function: {place} cannot be called with the data's columns: " in message
    assert expected in message
    assert "prompts, completions, completion_ids, finish_reason, answer, level" in message
    assert ("Let it take **columns" in message) == ("**" not in parameters)
    assert ("Did you mean 'level'?" in message) == ("levle" in parameters)


def test_args_are_given_as_well(own):
    check(own("completions, bonus, **_"), bonus=1)
    assert "missing a required argument: 'bonus'" in refusal(own("completions, bonus, **_"))


def test_a_column_that_only_the_training_examples_have_is_missed_in_the_others(own):
    assert "'level'" in refusal(own("completions, level, **_"), EXAMPLES, [Example("3+3?", "6")])


@pytest.mark.parametrize(
    ("function", "answer", "expected"),
    [
        ("exact_match", None, "the example has no answer"),
        ("integer_answer", "4.5", "the answer is no integer: '4.5'"),
        ("integer_answer", "9" * 5000, "the answer is no integer"),
        ("integer_answer", ["1", "2"], "this reward takes one answer"),
        ("numeric_match", ["4", "four"], "the answer is no number"),
        ("gsm8k", "4", "the answer has no number after '####'"),
    ],
)
def test_an_example_that_a_built_in_cannot_score_is_named(function, answer, expected):
    bad = Example([{"role": "user", "content": "2+2?"}], answer)
    good = Example("1+1?", "#### 1" if function == "gsm8k" else "1")
    message = refusal(function, [good, bad])
    assert f"rewards.1.function: {function}: {expected}" in message
    assert "for example 2 of those to train on.\n  prompt: '2+2?'" in message
    assert "example 1 of those held out" in refusal(function, [good], [bad])


def test_an_answer_that_only_an_own_reward_can_read_is_no_match_for_a_built_in():
    bad = Example("1+1?", columns={"answer": {"is": 2}})
    for function in ("exact_match", "numeric_match", "integer_answer", "gsm8k"):
        assert "expected the answer as text or a list of texts, got {'is': 2}" in refusal(function, [bad])


def test_tests_of_code_are_looked_at():
    assert "there is no column 'tests'" in refusal("code_execution")
    with_tests = [Example("add", columns={"tests": tests}) for tests in ("assert add(1, 1) == 2", "def test(): pass")]
    check("code_execution", with_tests[:1])
    assert "its tests check nothing" in refusal("code_execution", with_tests)


def test_a_verifiers_reward_needs_its_environment():
    assert "missing a required argument: 'verifiers_taskset'" in refusal("verifiers")


def test_a_session_says_it_before_anything_starts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1?", "answer": "two"}) + "\n")
    settings = config.load(arguments.demo(), [f"data.source={rows}", "data.eval_size=0"])
    with pytest.raises(ConfigError, match="integer_answer: the answer is no integer: 'two'"):
        Session(settings, Placement(mode="cpu"))
