"""The command that adds a package to the trainer's environment: it works as it is pasted."""

import subprocess
import sys

import pytest

from trainer_env.extra_packages import environment, install_command, remedy


@pytest.fixture
def venvs(tmp_path, monkeypatch):
    """Environments in a folder with a space in its name; this process runs in the trainer's. No uv on PATH."""
    folder = tmp_path / "my venvs"
    (folder / "trainer-0" / "bin").mkdir(parents=True)
    (folder / "trainer").symlink_to("trainer-0")
    monkeypatch.setattr(sys, "prefix", str(folder / "trainer-0"))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.delenv("TANDEM_UV", raising=False)
    return folder


def fake_uv(folder):
    folder.mkdir(parents=True)
    uv = folder / "uv"
    uv.write_text('#!/bin/sh\nfor word in "$0" "$@"; do echo "$word"; done\n')
    uv.chmod(0o755)
    return uv


def pasted(command, cwd):
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=True, cwd=cwd, timeout=30)
    return done.stdout.splitlines()


def expected(venvs, uv):
    return [str(uv), "pip", "install", "--python", f"{venvs}/trainer/bin/python", "verifiers>=0.4", "comet-ml"]


def test_the_uv_that_setup_got_for_itself_is_named_by_its_path(venvs, tmp_path):
    uv = fake_uv(venvs / ".uv" / "bin")
    assert pasted(install_command("verifiers>=0.4", "comet-ml"), tmp_path) == expected(venvs, uv)


def test_one_on_path_is_enough(venvs, tmp_path):
    fake_uv(venvs / ".uv" / "bin")
    uv = fake_uv(tmp_path / "programs")
    command = install_command("verifiers>=0.4", "comet-ml")
    assert command.startswith("uv pip install ")
    assert pasted(command, tmp_path) == expected(venvs, uv)


def test_the_one_that_setup_was_told_of(venvs, tmp_path, monkeypatch):
    uv = fake_uv(tmp_path / "elsewhere")
    monkeypatch.setenv("TANDEM_UV", str(uv))
    assert pasted(install_command("verifiers>=0.4", "comet-ml"), tmp_path) == expected(venvs, uv)


def test_a_build_that_is_not_the_trainers_any_more_is_named_itself(venvs):
    (venvs / "trainer-1").mkdir()
    (venvs / "trainer").unlink()
    (venvs / "trainer").symlink_to("trainer-1")
    assert environment() == venvs / "trainer-0"


def test_the_remedy_says_how_long_it_lasts(venvs):
    assert remedy("wandb").startswith(f"uv pip install --python '{venvs}/trainer/bin/python' wandb; again after ")
