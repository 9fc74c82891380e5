"""The doctor's training from end to end, with stand-ins that do as the real commands do, up to a point."""

import sys
import tempfile
from pathlib import Path

import pytest

from environments.rehearsal import Failed, Rehearsal, rehearse

STEPS = ["import", "configuration", "server starts", "completes prompts", "step trains", "adapter is served", "ends"]
TRAIN = f"""#!{sys.executable} -S
import json, sys
from pathlib import Path

words = sys.argv[1:]
if "--check" in words:
    sys.exit({{check}})
folder = Path(next(word for word in words if word.startswith("output_dir=")).partition("=")[2]) / "smoke"
folder.mkdir(parents=True)
leave = [
    ("connection.json", {{{{}}}}),
    ("evaluations.jsonl", {{{{"phase": "eval_before"}}}}),
    ("metrics.jsonl", {{{{"step": 1}}}}),
    ("samples.jsonl", {{{{"phase": "eval_after", "version": {{version}}}}}}),
]
for name, content in leave[:{{reached}}]:
    (folder / name).write_text(json.dumps(content) + "\\n")
if {{reached}} < 4:
    sys.exit("a library's warning\\ntandem-train: The GPU is on holiday.\\n  why: It is Sunday.")
{{ending}}
"""
NOTE = 'Path(sys.argv[0]).with_name("backend").write_text(words[words.index("--backend") + 1])'
TIDY = '(folder / "connection.json").unlink()'


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """Where the folders of rehearsals that fail stay."""
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def venvs(tmp_path):
    for name in ("trainer", "server-vllm"):
        (tmp_path / name / "bin").mkdir(parents=True)
        program(tmp_path / name / "bin" / "python", "#!/bin/sh\nexit 0\n")
    return tmp_path


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def training(venvs, *, check="0", version=2, reached=4, ending=TIDY):
    text = TRAIN.format(check=check, version=version, reached=reached, ending=ending)
    program(venvs / "trainer" / "bin" / "tandem-train", text)


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]


def test_every_step_is_a_numbered_line(venvs, capsys, kept):
    training(venvs)
    assert rehearse(venvs, Path("smoke.toml")) == 0
    assert list(kept.iterdir()) == []
    said = lines(capsys)
    assert len(said) == len(STEPS)
    for number, (line, what) in enumerate(zip(said, STEPS, strict=True), start=1):
        assert line.startswith(f"{number}. ")
        assert what in line
        assert ": ok, " in line


@pytest.mark.parametrize("reached", [0, 1, 2, 3])
def test_the_first_step_that_is_not_reached_ends_it_with_the_reason(venvs, capsys, reached):
    training(venvs, reached=reached)
    assert rehearse(venvs, Path("smoke.toml")) == 2
    said = lines(capsys)
    assert len(said) == 3 + reached
    assert said[-1].endswith("FAILED (The GPU is on holiday.)")


def test_the_server_that_is_installed_is_the_one_that_samples(venvs, capsys):
    training(venvs, reached=0)
    train = venvs / "trainer" / "bin" / "tandem-train"
    train.write_text(train.read_text().replace("words = sys.argv[1:]", f"words = sys.argv[1:]\n{NOTE}"))
    for backend in ("vllm", "sglang"):
        if backend == "sglang":
            (venvs / "server-vllm").rename(venvs / "server-sglang")
        assert rehearse(venvs, Path("smoke.toml")) == 2
        assert lines(capsys)[-1].startswith("3. ")
        assert (venvs / "trainer" / "bin" / "backend").read_text() == backend


def test_an_import_that_fails_is_told(venvs, capsys):
    program(venvs / "server-vllm" / "bin" / "python", "#!/bin/sh\necho 'ImportError: no zmq' >&2; exit 1\n")
    assert rehearse(venvs, Path("smoke.toml")) == 2
    assert lines(capsys)[-1].endswith("FAILED (ImportError: no zmq)")


def test_a_missing_environment_is_told_and_no_empty_folder_is_called_a_log(venvs, capsys, kept):
    assert rehearse(venvs / "nowhere", Path("smoke.toml")) == 2
    said = capsys.readouterr().out
    assert "No such file" in said
    assert "logs" not in said
    assert list(kept.iterdir()) == []


def test_what_a_failed_rehearsal_wrote_is_kept_and_named(venvs, capsys, kept):
    training(venvs, reached=1)
    assert rehearse(venvs, Path("smoke.toml")) == 2
    (folder,) = kept.iterdir()
    assert f"logs: {folder}" in capsys.readouterr().out
    assert (folder / "run" / "smoke" / "connection.json").exists()


def test_a_configuration_that_is_refused_is_told(venvs, capsys):
    training(venvs, check=repr("tandem-train: there is no such key"))
    assert rehearse(venvs, Path("smoke.toml")) == 2
    said = lines(capsys)
    assert said[-1].startswith("2. ")
    assert said[-1].endswith("FAILED (tandem-train: there is no such key)")


def test_a_base_model_that_still_answers_after_training_is_a_failure(venvs, capsys):
    training(venvs, version=0)
    assert rehearse(venvs, Path("smoke.toml")) == 2
    assert lines(capsys)[-1].startswith("6. ")


def test_an_address_that_stays_published_is_a_failure(venvs, capsys):
    training(venvs, ending="")
    assert rehearse(venvs, Path("smoke.toml")) == 2
    assert lines(capsys)[-1].startswith("7. ")


def test_a_process_that_lives_on_is_a_failure(venvs, tmp_path):
    over = tmp_path / "over"
    ending = f"""
import os, time
{TIDY}
if os.fork():
    os._exit(0)
deadline = time.monotonic() + 60
while not Path({str(over)!r}).exists() and time.monotonic() < deadline:
    time.sleep(0.02)
"""
    training(venvs, ending=ending)
    with pytest.raises(Failed, match="live on"):
        Rehearsal(venvs, Path("smoke.toml"), tmp_path).run()
    over.touch()
