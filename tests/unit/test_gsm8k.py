"""GSM8K's answers end in `#### 42`: parsed from rows in that format, and matched with what a model writes."""

from pathlib import Path

import pytest

from trainer_env import config, data, rewards
from trainer_env.rewards.builtin_rewards import gsm8k_answer
from trainer_env.rewards.reward_errors import RewardError

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "tests/data/gsm8k_rows.jsonl"
ANSWERS = [42, 1240, -6, 13.5, 4]


@pytest.fixture
def recipe():
    overrides = [f'data.source="{ROWS}"', "data.eval_split=", "data.eval_size=0", "data.subset="]
    return config.load(ROOT / "configs/qwen-gsm8k.toml", overrides)


@pytest.fixture
def examples(recipe):
    return data.load(recipe.data, recipe.seed).train


def score(recipe, examples, completions):
    prompts = [example.prompt for example in examples]
    answers = [example.answer for example in examples]
    return rewards.score(rewards.load(recipe.rewards), prompts, completions, answer=answers)


def test_the_rows_parse(examples):
    assert [gsm8k_answer(example.answer) for example in examples] == ANSWERS


def test_the_prompt_is_the_question_under_the_system_prompt(examples):
    assert [message["role"] for message in examples[0].prompt] == ["system", "user"]
    assert examples[0].prompt[1]["content"].startswith("A bakery fills 6 trays")


@pytest.mark.parametrize("style", ["#### {}", "so it is\n#### {:,}", "The answer is {}.", "#### ${}", "= {} "])
def test_right_answers_are_right_however_they_are_written(recipe, examples, style):
    completions = [[{"role": "assistant", "content": style.format(value)}] for value in ANSWERS]
    assert score(recipe, examples, completions).each["gsm8k"] == [1.0] * 5


def test_wrong_answers_are_wrong(recipe, examples):
    completions = [f"I had {value} before.\n#### {value + 1}" for value in ANSWERS]
    scores = score(recipe, examples, completions)
    assert scores.each["gsm8k"] == [0.0] * 5
    assert scores.total == pytest.approx([0.1] * 5)


def test_the_marked_number_counts_rather_than_the_last(recipe, examples):
    completions = [f"#### {value}\nThat took 99 steps." for value in ANSWERS]
    assert score(recipe, examples, completions).each["gsm8k"] == [1.0] * 5


def test_the_intermediate_results_of_the_reference_do_not_count(recipe, examples):
    assert score(recipe, examples, ["72", "1500", "9", "40.50", "90"]).each["gsm8k"] == [0.0] * 5


def test_an_answer_without_the_marker_is_named(recipe, examples):
    (reward,) = [reward for reward in rewards.load(recipe.rewards) if reward.name == "gsm8k"]
    with pytest.raises(RewardError, match="no number after '####': '42'"):
        reward([examples[0].prompt], ["42"], answer=["42"])
