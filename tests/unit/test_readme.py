"""The README's own reward, run as a reader would run it."""

import re
import tomllib

import msgspec
import pytest

from served import ROOT
from trainer_env import rewards
from trainer_env.config import RewardConfig

PYTHON, TOML = (
    rf"```{language}\n(?P<text>[^`]*{name}[^`]*)```"
    for language, name in (("python", "# my_rewards.py"), ("toml", "my_rewards.py:"))
)
QUESTION = [{"role": "user", "content": "What is 2+2?"}]


def block(pattern):
    found = re.search(pattern, (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "the README has an example of a reward"
    return found["text"]


@pytest.fixture
def reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(block(PYTHON), encoding="utf-8")
    (reward,) = rewards.load(msgspec.convert(tomllib.loads(block(TOML))["rewards"], list[RewardConfig]))
    return reward


def test_it_pays_more_for_right_answers_to_a_chat_and_more_for_short_ones(reward):
    texts = ["4", "2+2 is what is asked for. " * 30 + "It is 4.", "It is 4. " * 1000, "5", "It is 5. " * 1000, ""]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    count = len(texts)
    short, long, endless, *wrong = reward(
        [QUESTION] * count, completions, answer=["4"] * count, finish_reason=["stop"] * count
    )
    assert short > long > endless > max(wrong)
