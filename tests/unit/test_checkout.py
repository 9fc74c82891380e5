"""What git and ruff leave out of the checkout: what runs and tools leave behind, and no source."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def said(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60).stdout.split("\n")


def git(*words):
    if not (shutil.which("git") and (ROOT / ".git").exists()):
        pytest.skip("needs git, and a checkout")
    return [line for line in said("git", *words) if line]


def test_a_new_file_beside_any_other_is_seen_by_git():
    folders = {Path(line).parent for line in git("ls-files")}
    assert git("check-ignore", "--no-index", *(str(folder / "new_module.py") for folder in folders)) == []


def test_what_a_run_leaves_behind_is_not_seen_by_git():
    left = ["runs/one/summary.json", "notebooks/runs/one/summary.json", ".venvs/trainer"]
    assert git("check-ignore", "--no-index", *left) == left


def test_ruff_checks_every_module_that_git_has():
    ruff = Path(sys.prefix, "bin", "ruff")
    if not ruff.exists():
        pytest.skip("needs ruff")
    modules = {str(ROOT / line) for line in git("ls-files", "*.py") if (ROOT / line).exists()}
    assert modules <= set(said(ruff, "check", "--show-files", "."))
