"""Reward functions: what the built-in ones pay, how others are loaded, and how a failing one is named."""

import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.errors import ConfigError
from trainer_env import rewards
from trainer_env.config import RewardConfig
from trainer_env.extra_packages import install_command
from trainer_env.rewards import Reward
from trainer_env.rewards.builtin_rewards import BUILTINS
from trainer_env.rewards.completions import text_of
from trainer_env.rewards.reward_errors import RewardError


def pay(function, completion, answer: str | list[str] = "15", finish="stop", ids=(), **args):
    (reward,) = rewards.load([RewardConfig(function=function, args=args)])
    columns = {"answer": [answer], "finish_reason": [finish], "completion_ids": [list(ids)]}
    return reward(["p"], [completion], **columns)[0]


def refusal(function, **args):
    with pytest.raises(ConfigError) as refused:
        rewards.load([RewardConfig(function=function, args=args)])
    return str(refused.value)


@pytest.mark.parametrize(
    ("completion", "finish", "expected"),
    [
        ("15", "stop", 1.0),
        ("7+8=15", "stop", 1.0),
        ("It is 15.", "stop", 1.0),
        ("015", "stop", 1.0),
        ("15", "length", 0.0),
        ("14", "stop", 0.2),
        ("15 or 16", "stop", 0.2),
        ("-15", "stop", 0.2),
        ("30-15", "stop", 1.0),
        ("fifteen", "stop", 0.2),
        ("", "stop", 0.2),
        ("9" * 5000, "stop", 0.2),
        ("It is 15.0.", "stop", 1.0),
        ("15.00", "stop", 1.0),
        ("3.15", "stop", 0.2),
        ("= .15", "stop", 0.2),
        ("1,015", "stop", 0.2),
        ("1,2,15", "stop", 1.0),
        ("The answer:...15", "stop", 1.0),
    ],
)
def test_integer_answer_pays_for_ending_and_for_the_last_integer(completion, finish, expected):
    assert pay("integer_answer", completion, finish=finish) == pytest.approx(expected)


def test_commas_between_thousands_belong_to_an_integer():
    assert pay("integer_answer", "It is 1,234.", "1234") == 1.0
    assert pay("integer_answer", "-12,345,678", "-12345678") == 1.0
    assert pay("integer_answer", "1,234", "234") == pytest.approx(0.2)


@pytest.mark.parametrize("answer", ["1,234", "1234.0", " 1234 ", "+1234", "1_234"])
def test_an_answer_is_an_integer_as_a_completion_may_write_it(answer):
    assert pay("integer_answer", "1,234.0", answer) == 1.0


@given(st.text("0123456789 +-=?:\n", max_size=30))
def test_without_points_and_commas_the_last_digits_with_their_sign_are_the_integer(text):
    digits = re.findall(r"(?<!\d)-?\d+", text) or ["none"]
    assert pay("integer_answer", text, digits[-1] if digits[-1] != "none" else "1") == pytest.approx(
        0.2 if digits == ["none"] else 1.0
    )


def test_messages_are_read_as_their_text():
    assert text_of([{"role": "assistant", "content": "1"}, {"role": "assistant", "content": None}]) == "1"
    assert pay("integer_answer", [{"role": "assistant", "content": "15"}]) == 1.0


@pytest.mark.parametrize(
    ("function", "completion", "answer", "args", "expected"),
    [
        ("exact_match", " Paris\n", "Paris", {}, 1),
        ("exact_match", "paris", "Paris", {}, 0),
        ("exact_match", "PARIS", "Paris", {"ignore_case": True}, 1),
        ("numeric_match", "about 1,234.50 dollars", "1234.5", {}, 1),
        ("numeric_match", "3.14", "3.14159", {}, 0),
        ("numeric_match", "3.14", "3.14159", {"tolerance": 0.01}, 1),
        ("numeric_match", "1e3", "1,000", {}, 1),
        ("numeric_match", "none", "0", {}, 0),
        ("numeric_match", ".5", "0.5", {}, 1),
        ("numeric_match", "= -.75", "-0.75", {}, 1),
        ("numeric_match", "$.25", ".25", {}, 1),
        ("numeric_match", "it is 5.", "5", {}, 1),
        ("numeric_match", "1.2.3", "1.2", {}, 1),
        ("gsm8k", "#### -$5", "#### -5", {}, 1),
        ("gsm8k", "#### 5", "#### -$5", {}, 0),
        ("gsm8k", "#### $1,005.50", "#### 1005.5", {}, 1),
        ("gsm8k", "#### $ -5", "#### -5", {}, 1),
        ("regex", "<a>x</a>", "", {"pattern": "<a>.*</a>"}, 1),
        ("regex", " <a>x</a> !", "", {"pattern": "<a>.*</a>", "whole": True}, 0),
        ("regex", "line\n#### 42\n", "", {"pattern": r"####\s*-?[\d,.]+\s*$"}, 1),
    ],
)
def test_built_in_matches(function, completion, answer, args, expected):
    assert pay(function, completion, answer, **args) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (50, 0.0)])
def test_length_pays_up_to_the_target(tokens, expected):
    assert pay("length", "x", ids=range(tokens), target=10) == pytest.approx(expected)


@given(st.text(max_size=60), st.sampled_from(["stop", "length"]))
def test_no_text_breaks_a_built_in(text, finish):
    made = {
        "length": BUILTINS["length"](target=3),
        **{name: BUILTINS[name]() for name in ("integer_answer", "exact_match", "numeric_match")},
    }
    for name, function in made.items():
        (paid,) = Reward(name, function)(["p"], [text], answer=["3"], finish_reason=[finish], completion_ids=[[1, 2]])
        assert 0 <= paid <= 1


@settings(max_examples=10, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=60), min_size=1, max_size=20))
def test_a_pattern_finds_what_re_finds_in_any_text(texts):
    function = BUILTINS["regex"](pattern="[ab]")
    assert function(completions=texts) == [float("a" in text or "b" in text) for text in texts]


def test_a_pattern_that_backtracks_for_ever_is_named_with_its_sample():
    (reward,) = rewards.load([RewardConfig(function="regex", args={"pattern": "(a+)+$", "seconds": 0.3})])
    with pytest.raises(RewardError, match=r"(?s)the pattern takes more than 0.3 s on it, for row 1.*completion: 'aaa"):
        reward(["p", "q", "r"], ["aaa", "a" * 60 + "b", "b"])


@pytest.mark.parametrize(
    ("function", "completion", "answer", "expected"),
    [
        ("exact_match", "Paris", ["Lutetia", "Paris"], 1),
        ("exact_match", "London", ["Lutetia", "Paris"], 0),
        ("numeric_match", "it is 7.0", ["5", "7"], 1),
        ("numeric_match", "it is 6", ["5", "7"], 0),
        ("integer_answer", "15", ["15"], 1),
    ],
)
def test_any_of_several_answers_will_do(function, completion, answer, expected):
    assert pay(function, completion, answer) == expected


def test_a_reward_for_one_answer_refuses_several():
    with pytest.raises(RewardError, match=r"takes one answer, and the example has 2: \['1', '2'\], for row 0"):
        pay("integer_answer", "1", ["1", "2"])


def test_an_example_without_an_answer_is_named():
    reward = Reward("integer_answer", BUILTINS["integer_answer"]())
    with pytest.raises(RewardError, match=r"(?s)has no answer, for row 1.*prompt: 'q'.*completion: 'b'"):
        reward(["p", "q"], ["a", "b"], answer=["1", None], finish_reason=["stop", "stop"])


@pytest.mark.parametrize("place", ["my_rewards:shout", "./my_rewards.py:shout"])
def test_a_function_is_loaded_from_a_module_or_a_file(tmp_path, monkeypatch, place):
    (tmp_path / "my_rewards.py").write_text(
        "def shout(prompts, completions, bonus=0, **_):\n    return [c.isupper() + bonus for c in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    (reward,) = rewards.load([RewardConfig(function=place, weight=0.5, name="loud", args={"bonus": 2})])
    assert (reward.name, reward.__name__, reward.weight) == ("loud", "loud", 0.5)
    assert reward(["p", "p"], ["A", "a"]) == [3.0, 2.0]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a file with rewards; gives its path."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="mine.py"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_args_go_before_a_column_of_their_name(own):
    path = own("def pay(completions, level=0, **_):\n    return [level] * len(completions)\n")
    (with_args,) = rewards.load([RewardConfig(function=f"{path}:pay", args={"level": 3})])
    (without,) = rewards.load([RewardConfig(function=f"{path}:pay")])
    assert with_args(["p"], ["c"], level=7) == [3.0]
    assert without(["p"], ["c"], level=7) == [7.0]


def test_args_cannot_stand_in_for_the_batch(own):
    path = own("def pay(completions, **_):\n    return [0.0]\n")
    assert "rewards.0.args.completions: it is what every reward is given" in refusal(f"{path}:pay", completions=["c"])


def test_a_file_with_several_rewards_runs_once(own, monkeypatch, tmp_path):
    path = own(
        "seen = []\n"
        "def first(completions, **_):\n    seen.append(1)\n    return [0.0] * len(completions)\n"
        "def second(completions, **_):\n    return [float(len(seen))] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    first, second = rewards.load([RewardConfig(function=f"{path}:first"), RewardConfig(function="./mine.py:second")])
    first(["p"], ["c"])
    assert second(["p"], ["c"]) == [1.0]
    (again,) = rewards.load([RewardConfig(function=f"{path}:second")])
    assert again(["p"], ["c"]) == [0.0]


def test_a_file_can_import_its_neighbour(own, monkeypatch):
    monkeypatch.delitem(sys.modules, "a_neighbour_of_mine", raising=False)
    own("PAID = 5.0\n", "a_neighbour_of_mine.py")
    path = own("from a_neighbour_of_mine import PAID\ndef pay(completions, **_):\n    return [PAID]\n")
    (reward,) = rewards.load([RewardConfig(function=f"{path}:pay")])
    assert reward(["p"], ["c"]) == [5.0]


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        ("integer_anser", {}, "Did you mean 'integer_answer'?"),
        ("zzz", {}, "your own is module:function"),
        ("regex", {}, "rewards.0.args: regex needs pattern"),
        ("regex", {"pattern": "("}, "rewards.0.args: regex:"),
        ("regex", {"pattern": 3}, "rewards.0.args: regex:"),
        ("regex", {"patern": "a"}, "rewards.0.args.patern: there is no such argument"),
        ("length", {"target": 0}, "at least 1, got 0"),
        ("no_such_module:f", {}, "no_such_module cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:f", {}, "nowhere.py: there is no such file"),
        ("json:lods", {}, "Did you mean json:loads?"),
        ("math:sqroot", {}, "math has no function 'sqroot'"),
    ],
)
def test_what_cannot_be_loaded_is_named(function, args, expected):
    assert expected in refusal(function, **args)


def test_a_file_that_fails_to_import_is_named(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_thing\n")
    message = refusal(f"{path}:f")
    assert "broken.py cannot be imported: ModuleNotFoundError" in message
    assert f"If no_such_thing is a package on the index: {install_command('no_such_thing')};" in message


@pytest.mark.parametrize("text", ["import json.no_such_part\n", "1 / 0\n"])
def test_what_no_package_mends_comes_without_the_command_that_installs_one(tmp_path, text):
    path = tmp_path / "broken.py"
    path.write_text(text)
    for message in (refusal(f"{path}:f"), refusal("no_such_module.part:f")):
        assert "import only what is installed there" in message
        assert " pip install " not in message


def test_an_async_reward_is_refused(tmp_path):
    path = tmp_path / "later.py"
    path.write_text("async def f(**_):\n    return [0.0]\n")
    assert "f is async" in refusal(f"{path}:f")


def failure(result, completions=("good", "bad")):
    def function(**_):
        return result

    with pytest.raises(RewardError) as failed:
        Reward("mine", function)(["p"] * len(completions), list(completions))
    return str(failed.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1.0", [1.0], {}])
def test_a_score_that_is_no_finite_number_is_named_with_its_sample(value):
    message = failure([1.0, value])
    assert f"Reward 'mine' returned {value!r} instead of a finite number for row 1." in message
    assert "completion: 'bad'" in message


@pytest.mark.parametrize("result", [None, 1.0, "11", {"a": 1}])
def test_a_result_that_is_no_list_is_refused(result):
    assert f"Reward 'mine' returned {result!r} instead of a list" in failure(result)


@pytest.mark.parametrize("result", [[], [1.0], [1.0, 2.0, 3.0]])
def test_a_result_of_the_wrong_length_is_refused(result):
    assert f"returned {len(result)} numbers for 2 completions" in failure(result)


def test_numpy_and_booleans_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert Reward("mine", lambda **_: numpy.array([1, 0.5]))(["p"] * 2, ["a", "b"]) == [1.0, 0.5]
    assert Reward("mine", lambda **_: (True, False))(["p"] * 2, ["a", "b"]) == [1.0, 0.0]


def test_a_reward_that_raises_is_named_with_the_sample_that_made_it_raise():
    def function(*, completions, level, **_):
        return [1 / level[row] for row in range(len(completions))]

    chats = [[{"role": "user", "content": text}] for text in "pqr"]
    with pytest.raises(RewardError) as failed:
        Reward("mine", function)(chats, ["a", "b", "c"], level=[1, 0, 2], trainer_state=object())
    message = str(failed.value)
    assert "Reward 'mine' raised ZeroDivisionError: division by zero, for row 1." in message
    assert "prompt: 'q'" in message
    assert "completion: 'b'" in message
    assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_a_reward_that_asks_for_a_column_that_is_not_there_learns_which_are():
    def function(*, completions, solution, **_):
        return [0.0 for _ in zip(completions, solution, strict=True)]

    with pytest.raises(RewardError, match=r"(?s)'solution'.*columns prompts, completions, answer"):
        Reward("mine", function)(["p"], ["a"], answer=["1"])


def test_the_total_is_the_weighted_sum():
    both = [Reward("a", lambda **_: [1.0, 0.0], 2.0), Reward("b", lambda **_: [0.5, 0.5], -1.0)]
    scores = rewards.score(both, ["p", "p"], ["x", "y"])
    assert scores.total == [1.5, -0.5]
    assert scores.each == {"a": [1.0, 0.0], "b": [0.5, 0.5]}
