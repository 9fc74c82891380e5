"""Prompts that leave no room for a completion: refused before anything starts, or left out, and said how many."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bridge.errors import ConfigError
from trainer import running
from trainer_env import cli
from trainer_env.data import Data, Example
from trainer_env.display import Silent
from trainer_env.models import tokenizing
from trainer_env.placement import Placement
from trainer_env.sampling.prompts import encode, fitting, fitting_early
from trainer_env.serving import Serving
from trainer_env.session import Session
from trainer_env.training import Training

LONG = "Why? " * 60
FILTER = "data.filter_overlong_prompts=true"


def example(text):
    return Example([{"role": "user", "content": text}], "7")


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tokenizing.load(tiny)


@pytest.fixture
def rows(tmp_path):
    """Eight rows, one of them long, as a setting."""
    texts = [f"What is {n}?" if n != 5 else LONG for n in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "7"}) + "\n" for text in texts))
    return f"data.source={path}"


@pytest.fixture
def no_server(monkeypatch):
    """The server half has nothing to say, and what it was started with is kept."""
    started: list[Any] = []
    monkeypatch.setattr(Serving, "check", lambda *_: "engine serve")
    monkeypatch.setattr(Serving, "start", lambda *words, **_: started.append(words))
    monkeypatch.setattr(Serving, "versions", lambda _: "engine 1")
    return started


def test_the_limit_is_the_context_less_the_longest_completion(make_config, tokenizer):
    prompt = example("What is 2+3?").prompt
    tokens = len(encode(prompt, tokenizer, make_config().data))
    data = Data([example("What is 2+3?")], [])
    config = make_config(f"model.max_seq_length={tokens + 6}", "grpo.max_completion_length=6")
    assert fitting(config, data, tokenizer).data == data
    for setting in ("grpo.max_completion_length=7", f"server.context_length={tokens + 5}"):
        config = make_config(f"model.max_seq_length={tokens + 6}", "grpo.max_completion_length=6", setting)
        with pytest.raises(ConfigError, match=f"A prompt of {tokens} tokens and a completion of up to"):
            fitting(config, data, tokenizer)


def test_the_first_is_quoted_and_all_are_counted(make_config, tokenizer):
    data = Data([example("short"), example(LONG), example(LONG * 2)], [example("short")])
    with pytest.raises(ConfigError, match=r"fit the context of 128 tokens.*begins: '.*Why\? Why\? ") as refused:
        fitting(make_config(), data, tokenizer)
    longest = len(encode(data.train[2].prompt, tokenizer, make_config().data))
    assert f"2 of 4 prompts are too long; the longest has {longest} tokens" in refused.value.why
    assert FILTER.replace("=", " = ") in refused.value.remedy


def test_they_can_be_left_out_and_are_counted(make_config, tokenizer):
    data = Data([example("a"), example(LONG), example("b")], [example(LONG), example("c")])
    found = fitting(make_config(FILTER), data, tokenizer)
    assert found.data == Data([example("a"), example("b")], [example("c")])
    assert "2 of 5 examples are left out: their prompts have more than 122 tokens" in found.remark(make_config())
    assert fitting(make_config(FILTER), found.data, tokenizer).remark(make_config()) == ""
    with pytest.raises(ConfigError, match="A prompt of"):  # There is nothing left to train on.
        fitting(make_config(FILTER), Data([example(LONG)], [example("c")]), tokenizer)


def test_without_a_tokenizer_file_it_is_the_trainers_to_say(make_config, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    data = Data([example(LONG)], [])
    with pytest.raises(ConfigError):
        fitting_early(make_config(), data, str(folder))
    (folder / "tokenizer.json").unlink()
    assert fitting_early(make_config(), data, str(folder)).data == data


def test_a_session_refuses_before_its_server_starts(make_config, rows, no_server):
    session = Session(make_config(rows, "data.eval_size=2", 'tracking.display="none"'), Placement(mode="cpu"))
    with pytest.raises(ConfigError, match="A prompt of"):
        session.start()
    assert no_server == []
    assert not session.is_open


def test_a_session_leaves_them_out_and_says_so(make_config, rows, no_server, capsys):
    settings = (rows, FILTER, "data.eval_size=2", 'tracking.display="plain"')
    session = Session(make_config(*settings), Placement(mode="cpu"))
    with session:
        session.start()
    assert "1 of 8 examples are left out" in capsys.readouterr().out
    assert "5 to train on, 2 held out" in str(session) or "6 to train on, 1 held out" in str(session)
    assert len(no_server) == 1


@pytest.mark.parametrize("filtered", [False, True])
def test_training_looks_before_it_waits_for_the_server(make_config, tiny, monkeypatch, filtered):
    class Connected(Exception):
        """Training has come as far as asking for the server."""

    class Noted(Silent):
        def note(self, text: str) -> None:
            noted.append(text)

    def connected():
        raise Connected

    noted: list[str] = []
    policy = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tiny))
    monkeypatch.setattr(Training, "_load_policy", lambda _: policy)
    nothing: Any = None
    training = Training(
        config=make_config(*([FILTER] if filtered else [])),
        placement=Placement(mode="cpu"),
        data=Data([example("a"), example(LONG)], []),
        rewards=(),
        model=tiny,
        serving=nothing,
        connected=connected,
        interrupts=nothing,
        display=Noted(),
        resume=False,
    )
    with pytest.raises(Connected if filtered else ConfigError):
        training.run()
    assert len(noted) == filtered


def test_checking_a_config_with_its_data_looks_as_well(rows, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "none"))
    words = ["config", "check", str(running.DEMO), "--load", "--set", rows, "--set", "data.eval_size=2"]
    words += ["--set", f'model.name="{running.TINY}"']
    assert cli.main(words) == cli.EXIT_CONFIG
    assert "demo.toml: A prompt of" in capsys.readouterr().out
    assert cli.main([*words, "--set", FILTER]) == 0
    assert cli.main([*words[:3], "--set", rows]) == 0
    capsys.readouterr()
    words[-1] = 'model.name="builtin:tiny-random-lama"'
    assert cli.main(words) == cli.EXIT_CONFIG
    assert "no builtin model" in capsys.readouterr().out
