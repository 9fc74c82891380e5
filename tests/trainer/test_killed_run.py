"""However a trainer is killed, the run that goes on is the run that nothing happened to."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from trainer.killed_run import LIVES

STEPS = 6
TIMES = {"rollout_s", "train_s", "publish_ms", "proof_ms", "generated_tokens_per_s", "wall_s"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed_run.py"), folder],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tests)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def journal(folder):
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def lines(folder, run, name):
    text = (folder / run / name).read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def adapter(folder, run):
    return (folder / run / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.timeout(700)
def test_its_figures_are_those_of_a_whole_run_each_step_once(folder):
    whole, killed = (
        [
            {name: value for name, value in step.items() if name not in TIMES}
            for step in lines(folder, run, "metrics.jsonl")
        ]
        for run in ("whole", "killed")
    )
    assert [step["step"] for step in killed] == list(range(1, STEPS + 1))
    assert killed == whole


def test_its_samples_are_those_of_a_whole_run(folder):
    assert lines(folder, "killed", "samples.jsonl") == lines(folder, "whole", "samples.jsonl")


def test_its_adapter_is_that_of_a_whole_run(folder):
    assert adapter(folder, "killed") == adapter(folder, "whole")


def test_every_version_has_the_same_bytes_in_every_life(journal):
    served = {}
    for entry in journal:
        if "served" in entry:
            served.setdefault(entry["served"], set()).add(entry["digest"])
    assert sorted(served) == list(range(1, STEPS + 1))
    assert all(len(digests) == 1 for digests in served.values())


def test_every_life_asks_what_a_whole_run_asks_in_its_order_and_under_the_same_versions(journal):
    def asked(run, life):
        keys = ("version", "min_version", "asked", "sampled")
        return [
            [entry[key] for key in keys]
            for entry in journal
            if entry["run"] == run and entry["life"] == life and "asked" in entry
        ]

    whole = asked("whole", 0)
    per_step = len(whole) // STEPS
    first = 0
    for number in range(len(LIVES) + 1):
        mine = asked("killed", number)
        if mine:
            first = mine[0][0] * per_step
        assert mine == whole[first : first + len(mine)], LIVES[number : number + 1]


def test_no_life_goes_back_behind_the_last_whole_checkpoint(journal):
    begun = [
        next(
            entry["served"]
            for entry in journal
            if entry["life"] == number and entry["run"] == "killed" and "served" in entry
        )
        for number in range(1, len(LIVES) + 1)
    ]
    assert begun == [2] * 9 + [4] * 2
    assert all(one <= other for one, other in pairwise(begun))
