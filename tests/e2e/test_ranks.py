"""Several trainer processes under one command: each samples and trains its share, and they begin and end together."""

import os
import signal
from pathlib import Path

import pytest

from bridge import guard
from bridge.endpoint import read_connection
from runs import scenario

SETTINGS = ("placement.trainer_ranks=2", "grpo.max_steps=4", "rollout.max_staleness=1")


def process(run, number):
    """The pid of one of the trainer's processes."""
    for pid in guard.descendants(run.process.pid):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"trainer_env.ranks.one_rank" in words and f"RANK={number}".encode() in variables:
            return pid
    pytest.fail(f"there is no process {number}\n{run.report()}")


@scenario
def two_ranks(lab):
    return lab.fake(*SETTINGS, "evaluation.after=true", "grpo.shuffle_dataset=false").finish()


@scenario
def second_rank_killed(lab):
    run = lab.fake(*SETTINGS, "grpo.max_steps=500", "grpo.save_steps=1")
    run.until(lambda: len(run.steps) > 2, "a few steps")
    os.kill(process(run, 1), signal.SIGKILL)
    run.finish()
    return run, lab.resume(run, f"grpo.max_steps={run.steps[-1] + 2}").finish()


@scenario
def server_of_two_ranks_killed(lab):
    run = lab.fake(*SETTINGS, "grpo.max_steps=30")
    run.until(lambda: len(run.steps) > 2, "a few steps")
    os.kill(read_connection(run.run_dir / "connection.json").pid, signal.SIGKILL)
    return run.finish()


@scenario
def two_ranks_interrupted(lab):
    run = lab.fake(*SETTINGS, "grpo.max_steps=500")
    run.until(lambda: len(run.steps) > 2, "a few steps")
    run.interrupt()
    return run.finish()


@scenario
def two_ranks_ended_early(lab):
    patience = (
        "evaluation.every=1",
        "evaluation.early_stopping_patience=1",
        "evaluation.early_stopping_threshold=10.0",
    )
    return lab.fake(*SETTINGS, "grpo.max_steps=50", *patience, "evaluation.after=true").finish()


def test_a_run_of_two_processes_is_one_run(two_ranks):
    assert two_ranks.code == 0, two_ranks.report()
    assert two_ranks.steps == [1, 2, 3, 4]
    assert [step["version"] for step in two_ranks.metrics] == [1, 2, 3, 4]
    assert two_ranks.summary["eval_after"] is not None
    assert (two_ranks.run_dir / "adapter" / "adapter_model.safetensors").is_file()
    assert "2 processes" in two_ranks.stdout


def test_each_of_them_samples_its_own_part_of_every_batch(two_ranks):
    for step in two_ranks.metrics:
        assert step["generated_tokens"] == pytest.approx(2 * 4 * step["completion_length"])
    assert [step["staleness"] for step in two_ranks.metrics] == [0, 1, 1, 1]
    groups = [tuple(entry["prompt"]) for entry in two_ranks.journal("generated") if entry["n"] == 2]
    assert len(groups) == 4 * 2 * 2  # Four steps of two processes with two groups each.
    assert len(set(groups)) == len(groups)


def test_a_killed_process_ends_the_run_with_its_name(second_rank_killed):
    run, resumed = second_rank_killed
    assert run.code == 1
    assert "Trainer process 1 of 2 was killed by SIGKILL, and the run ends with it." in run.stderr
    assert "--resume" in run.stderr
    assert resumed.code == 0, resumed.report()
    assert resumed.steps == list(range(1, resumed.steps[-1] + 1))


def test_a_killed_server_is_replaced_for_both(server_of_two_ranks_killed):
    run = server_of_two_ranks_killed
    assert run.code == 0, run.report()
    assert run.steps == list(range(1, 31))
    assert run.summary["restarts"] == 1


def test_ctrl_c_ends_both_after_the_same_step(two_ranks_interrupted):
    run = two_ranks_interrupted
    assert run.code == 130, run.report()
    assert f"interrupted after step {run.steps[-1]} of 500" in run.stderr
    assert (run.run_dir / "checkpoints" / f"checkpoint-{run.steps[-1]}" / "trainer_state.json").is_file()


def test_an_early_end_ends_both_after_the_same_step(two_ranks_ended_early):
    run = two_ranks_ended_early
    assert run.code == 0, run.report()
    assert run.steps == [1, 2]
    assert run.summary["stopped_early"]
    assert run.summary["best_step"] == 1
    assert run.summary["eval_after"] is not None
    assert (run.run_dir / "adapter" / "adapter_model.safetensors").is_file()
    assert (run.run_dir / "checkpoints" / "checkpoint-2" / "trainer_state.json").is_file()
    assert "early, after step 2" in run.stdout


@pytest.mark.parametrize("run", ["two_ranks", "two_ranks_ended_early", "server_of_two_ranks_killed"], indirect=True)
def test_nobody_lives_afterwards(run):
    assert run.left == {}


def test_nobody_lives_after_a_process_was_killed_or_interrupted(second_rank_killed, two_ranks_interrupted):
    for run in (*second_rank_killed, two_ranks_interrupted):
        assert run.left == {}
