"""The command line: what each flag comes to, and that it needs nothing but the standard library."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.settings import apply_overrides
from trainer_env import arguments
from trainer_env.runs.finding import to_resume


def overrides(*argv):
    return apply_overrides({}, arguments.to_overrides(arguments.parse(argv)))


def test_flags_become_settings():
    argv = ["--backend", "sglang", "--steps", "3", "--run", "adding", "--placement", "split"]
    argv += ["--server-gpus", "0", "--trainer-gpus", "1,GPU-ab"]
    assert overrides(*argv) == {
        "server": {"backend": "sglang"},
        "grpo": {"max_steps": 3},
        "run": "adding",
        "placement": {"mode": "split", "server_gpus": ["0"], "trainer_gpus": ["1", "GPU-ab"]},
    }


def test_without_flags_nothing_is_overridden():
    assert overrides() == {}


def test_a_flag_wins_over_set():
    assert overrides("--steps", "5", "--set", "grpo.max_steps=9")["grpo"] == {"max_steps": 5}


def test_a_run_name_that_looks_like_a_number_stays_a_name():
    assert overrides("--run", "1e5") == {"run": "1e5"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--steps", "0"], "at least 1, got '0'"),
        (["--steps", "x"], "at least 1, got 'x'"),
        (["--set", "grpo.beta"], "expected KEY=VALUE"),
        (["--run", "../elsewhere"], "'../elsewhere'"),
        (["--backend", "vlm"], "invalid choice: 'vlm'"),
        (["--server-gpus", "0,,1"], "joined by commas"),
        (["--resume", "x", "--run", "y"], "leave out --config and --run"),
        (["--resume", "x", "--config", "c.toml"], "leave out --config and --run"),
        (["--conf", "c.toml"], "unrecognized arguments"),
    ],
)
def test_bad_usage_says_what_was_expected(argv, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(argv)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_demo_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = arguments.parse([]).config
    assert config.name == "demo.toml"
    assert config.is_file()


def runs(folder: Path, *names: str) -> Path:
    for age, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        path = folder / name / "config.toml"
        path.write_text("")
        os.utime(path, (1000 + age, 1000 + age))
    return folder


def test_resume_loads_the_runs_own_config(tmp_path, monkeypatch):
    runs(tmp_path / "runs", "one", "two")
    monkeypatch.chdir(tmp_path)
    parsed = arguments.parse(["--resume", "one"])
    assert (parsed.resume, parsed.config) == ("one", Path("runs/one/config.toml"))


@pytest.mark.parametrize("output_dir", ["runs", "my runs/of today", "/{tmp}/elsewhere"])
def test_the_words_that_a_run_ends_with_go_on_with_it(tmp_path, monkeypatch, output_dir):
    folder = Path(output_dir.format(tmp=tmp_path))
    monkeypatch.chdir(tmp_path)
    runs(folder, "one", "two")
    words = to_resume(folder / "one")
    assert ("--set" in words) is (output_dir != "runs")
    parsed = arguments.parse(shlex.split(words))
    assert (parsed.resume, parsed.config) == ("one", folder / "one" / "config.toml")


def test_resume_without_a_name_takes_the_newest_run(tmp_path):
    folder = runs(tmp_path / "elsewhere", "one", "two")
    parsed = arguments.parse(["--resume", "--set", f'output_dir="{folder}"'])
    assert (parsed.resume, parsed.config) == ("two", folder / "two" / "config.toml")


def test_resume_of_an_unknown_run_names_those_that_exist(tmp_path, monkeypatch, capsys):
    runs(tmp_path / "runs", "one", "two")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        arguments.parse(["--resume", "three"])
    assert "no run 'three' in runs; there are: one, two" in capsys.readouterr().err


def test_resume_with_no_run_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        arguments.parse(["--resume"])
    assert "holds no run" in capsys.readouterr().err


def test_help_explains_by_example(capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--resume adding" in text
    assert "adapter/" in text


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        arguments.parse(["--version"])
    assert ended.value.code == 0
    project = Path(arguments.__file__).parents[2] / "pyproject.toml"
    assert f'version = "{capsys.readouterr().out.split()[1]}"' in project.read_text()


def test_it_imports_the_standard_library_alone():
    code = (
        f"import sys, runpy; runpy.run_path({arguments.__file__!r})['parse']([])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded - sys.stdlib_module_names - {'__main__'}))"
    )
    # Isolated and without site-packages, whose .pth files import what they like.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"
