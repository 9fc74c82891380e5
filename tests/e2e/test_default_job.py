"""The default job, all of it: a 135M model learns to add two numbers. Minutes long, so only when it is asked for."""

import os

import pytest

from killing import kill_engine, kill_trainer
from runs import ROOT, scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TANDEM_TEST_FULL") != "1", reason="takes minutes: set TANDEM_TEST_FULL=1"),
    pytest.mark.timeout(7200),  # The first one waits for the runs of the others, too.
]


def start(lab, name, *settings):
    output_dir = lab.folder / name / "runs"
    words = ["python3", str(ROOT / "scripts" / "train.py"), "--run", "run"]
    for setting in (f"output_dir={output_dir}", *settings):
        words += ["--set", setting]
    return lab.start(*words, output_dir=output_dir)


@scenario
def default_job(lab):
    return start(lab, "default").finish(1500)


@scenario
def default_job_with_killed_trainer(lab):
    return kill_trainer(lab, start(lab, "killed-trainer", "grpo.save_steps=4"), (5, 10, 15), 8.0)[-1]


@scenario
def default_job_with_killed_engine(lab):
    return kill_engine(start(lab, "killed-engine"), (2, 6, 10, 14, 18), 8.0)


def test_it_learns_to_add(default_job):
    assert default_job.code == 0, default_job.report()
    summary = default_job.summary
    assert summary["reward_first4"] <= 0.45
    assert summary["reward_last4"] >= 0.80


def test_it_adds_what_it_has_not_seen(default_job):
    assert default_job.summary["eval_after"] > default_job.summary["eval_before"]


def test_the_first_ratio_is_1(default_job):
    assert 0.95 <= default_job.metrics[0]["ratio_mean"] <= 1.05


@pytest.mark.parametrize("run", ["default_job_with_killed_trainer", "default_job_with_killed_engine"], indirect=True)
def test_it_learns_all_the_same_when_it_is_killed(run):
    assert run.code == 0, run.report()
    assert run.steps == list(range(1, run.summary["steps"] + 1))
    assert run.summary["reward_last4"] >= 0.80


def test_each_engine_that_was_killed_was_started_again(default_job_with_killed_engine):
    assert default_job_with_killed_engine.summary["restarts"] == 5


@pytest.mark.parametrize(
    "run", ["default_job", "default_job_with_killed_trainer", "default_job_with_killed_engine"], indirect=True
)
def test_nobody_lives_when_it_has_ended(run):
    assert run.left == {}
