"""tandem-train evaluate: which versions it asks a session for, and how it shows what came of them."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.errors import ConfigError
from trainer_env.commands import evaluate
from trainer_env.evaluation import Answered
from trainer_env.runs.finding import find_run
from trainer_env.session import Session

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
REWARDS = {"base": 0.25, "latest": 0.5, 12: 0.75}


@pytest.fixture
def adding(tmp_path, monkeypatch):
    """A run's folder; the working directory holds it in runs/."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "adding"
    folder.mkdir(parents=True)
    shutil.copy(DEMO, folder / "config.toml")
    return folder


@pytest.fixture
def opened(monkeypatch):
    """What sessions were opened with and asked for."""
    calls = []

    class Opened:
        def evaluate(self, *, version, n, temperature, max_examples):
            calls.append((version, n, temperature, max_examples))
            return Answered(
                samples=[],
                examples=24,
                num_generations=n or 1,
                temperature=temperature or 0.0,
                reward_mean=REWARDS[version],
                pass_at={"1": 0.125, "2": 0.375} if n else {"1": 0.125},
            )

    @contextmanager
    def attach(run, *overrides):
        calls.append((run, overrides))
        yield Opened()

    monkeypatch.setattr(Session, "attach", attach)
    return calls


def test_without_options_it_is_the_last_adapter_as_the_config_says(adding, opened, capsys):
    assert evaluate.main(["adding"]) == 0
    assert opened == [
        (str(adding), ()),
        ("latest", None, None, None),
    ]
    assert "24 held-out examples, 1 answer each at temperature 0" in capsys.readouterr().out


def test_base_against_the_best_adapter_is_a_table_with_a_row_each(adding, opened, capsys):
    (adding / "best").mkdir()
    (adding / "best" / "best.json").write_text('{"step": 12, "reward_mean": 0.7, "version": 12}')
    assert evaluate.main([str(adding), "--base", "--version", "best", "--n", "2", "--temperature", "0.8"]) == 0
    assert opened[1:] == [("base", 2, 0.8, None), (12, 2, 0.8, None)]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["version", "reward", "pass@1", "pass@2"] in rows
    assert ["base", "0.250", "0.125", "0.375"] in rows
    assert ["best", "0.750", "0.125", "0.375"] in rows


def test_json_is_all_that_is_printed(adding, opened, capsys):
    assert evaluate.main(["adding", "--base", "--max-examples", "3", "--json"]) == 0
    base, last = json.loads(capsys.readouterr().out)
    assert opened == [
        (str(adding), ('tracking.display="none"',)),
        ("base", None, None, 3),
        ("latest", None, None, 3),
    ]
    assert (base["version"], base["reward_mean"], base["pass_at"]) == ("base", 0.25, {"1": 0.125})
    assert (last["version"], last["reward_mean"]) == ("last", 0.5)


def test_the_run_that_is_named_is_the_one_that_is_opened_whatever_lies_here(adding, opened):
    for other in ("adding", "elsewhere/adding"):
        shutil.copytree(adding, other)
    elsewhere = Path("elsewhere/adding").resolve()
    assert evaluate.main(["elsewhere/adding"]) == evaluate.main(["adding", "--output-dir", "elsewhere"]) == 0
    assert [call[0] for call in opened[::2]] == [str(elsewhere)] * 2
    assert find_run("adding", Path("elsewhere")).resolve() == elsewhere
    assert find_run("adding").resolve() == Path("adding").resolve()
    assert find_run("./adding", Path("elsewhere")).resolve() == Path("adding").resolve()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ading"], "There is no run 'ading'"),
        (["adding", "--version", "best"], "adding has no best adapter"),
        (["adding", "--n", "4"], "4 answers at evaluation.temperature 0 are all alike"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(adding, opened, words, expected):
    with pytest.raises(ConfigError) as refused:
        evaluate.main(words)
    assert expected in str(refused.value)
    assert opened == []


@pytest.mark.parametrize("words", [["--n", "0"], ["--temperature", "nan"], ["--temperature", "-1"], ["--version", "3"]])
def test_bad_usage_is_named(adding, capsys, words):
    with pytest.raises(SystemExit):
        evaluate.main(["adding", *words])
    assert words[0] in capsys.readouterr().err
