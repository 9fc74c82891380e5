"""The one command, as someone runs it who has just cloned the repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runs import ROOT

SYSTEM_PYTHON = shutil.which("python3", path=os.defpath) or str(Path(sys.base_prefix) / "bin" / "python3")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The repository's files and nothing else: no environments, no runs."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def outside_any_environment(**variables):
    """Variables of a shell in which no environment is active."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "PATH": os.defpath, **variables}


def test_help_needs_nothing_but_the_systems_python(clone):
    done = subprocess.run(
        [SYSTEM_PYTHON, "scripts/train.py", "--help"],
        cwd=clone,
        env=outside_any_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for option in ("--backend", "--config", "--set", "--steps", "--run", "--resume"):
        assert option in done.stdout
    assert not (clone / ".venvs").exists()
    assert not (clone / "runs").exists()


def test_a_mistake_is_found_before_anything_is_installed(clone):
    done = subprocess.run(
        [SYSTEM_PYTHON, "scripts/train.py", "--set", "server.backend=vlm"],
        cwd=clone,
        env=outside_any_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "server.backend: expected one of vllm, sglang" in done.stderr
    assert not (clone / ".venvs").exists()


def test_check_prints_the_plan_and_starts_nothing(lab):
    words = (SYSTEM_PYTHON, str(ROOT / "scripts" / "train.py"), "--check")
    run = lab.start(*words, "--set", f"output_dir={lab.folder / 'checked'}").finish()
    assert run.code == 0, run.report()
    said = {line.split()[0]: line for line in run.stdout.splitlines() if line.strip()}
    assert "builtin:smollm2-135m-instruct" in said["model"]
    assert "builtin:arithmetic" in said["data"]
    assert "prompts x" in said["steps"]
    assert said["placement"].split()[1].rstrip(":") in ("cpu", "split", "time-share")
    assert "--max-lora-rank 8" in said["engine"]
    assert not (lab.folder / "checked").exists()
    assert list(run.cwd.iterdir()) == []
    assert run.left == {}
