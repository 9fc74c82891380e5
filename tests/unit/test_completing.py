"""Prompts as people write them, and versions as they call them."""

from typing import Any

import pytest

from bridge.errors import ConfigError
from trainer_env.config import DataConfig
from trainer_env.session.completing import as_prompts, is_single, number_of

USER = {"role": "user", "content": "What?"}
SYSTEM = {"role": "system", "content": "Be brief."}
OWN = {"role": "system", "content": "Be long."}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("What?", [[SYSTEM, USER]]),
        ([USER], [[SYSTEM, USER]]),
        ([OWN, USER], [[OWN, USER]]),
        (["What?", "What?"], [[SYSTEM, USER], [SYSTEM, USER]]),
        ([[USER], "What?"], [[SYSTEM, USER], [SYSTEM, USER]]),
    ],
)
def test_prompts_become_what_the_runs_data_has(prompts, expected):
    assert as_prompts(prompts, DataConfig(system_prompt="Be brief.")) == expected


def test_plain_text_stays_so_where_the_run_is_not_a_chat():
    assert as_prompts(["What?", "Who?"], DataConfig(chat=False)) == ["What?", "Who?"]


@pytest.mark.parametrize(("prompts", "single"), [("a", True), ([USER], True), (["a"], False), ([[USER]], False)])
def test_one_prompt_is_told_from_a_list_of_one(prompts, single):
    assert is_single(prompts) is single


@pytest.mark.parametrize("prompts", [[5], [{"content": "x"}], [[]], [[{"role": "user"}]]])
def test_what_is_no_prompt_is_shown(prompts):
    with pytest.raises(ConfigError, match="text or as a list of messages"):
        as_prompts(prompts, DataConfig())


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_that_was_cut_within_a_character_is_refused(chat):
    with pytest.raises(ConfigError, match="The prompt: half of a surrogate pair"):
        as_prompts("What\ud83d", DataConfig(chat=chat))


def test_one_message_is_no_conversation():
    message: Any = USER
    with pytest.raises(ConfigError, match="got one message"):
        as_prompts(message, DataConfig())


@pytest.mark.parametrize(("version", "number"), [("latest", -1), ("base", 0), (0, 0), (12, 12)])
def test_versions_by_name_and_number(version, number):
    assert number_of(version) == number


@pytest.mark.parametrize("version", ["newest", -1, True, 1.5, None])
def test_another_version_is_refused(version):
    with pytest.raises(ConfigError, match="'latest', 'base' or a number"):
        number_of(version)
