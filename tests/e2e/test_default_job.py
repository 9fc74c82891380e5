"""The default job, all of it: a 135M model learns to add two numbers. Minutes long, so only when it is asked for."""

import os

import pytest

from runs import ROOT, scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TANDEM_TEST_FULL") != "1", reason="takes minutes: set TANDEM_TEST_FULL=1"),
]


@scenario
def default_job(lab):
    output_dir = lab.folder / "default" / "runs"
    words = ("python3", str(ROOT / "scripts" / "train.py"), "--run", "run", "--set", f"output_dir={output_dir}")
    return lab.start(*words, output_dir=output_dir).finish(1500)


def test_it_learns_to_add(default_job):
    assert default_job.code == 0, default_job.report()
    summary = default_job.summary
    assert summary["reward_first4"] <= 0.45
    assert summary["reward_last4"] >= 0.80


def test_it_adds_what_it_has_not_seen(default_job):
    assert default_job.summary["eval_after"] > default_job.summary["eval_before"]


def test_the_first_ratio_is_1(default_job):
    assert 0.95 <= default_job.metrics[0]["ratio_mean"] <= 1.05


def test_nobody_lives_when_it_has_ended(default_job):
    assert default_job.left == {}
