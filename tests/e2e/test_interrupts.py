"""Ctrl-C and SIGTERM in each phase of a run: it ends, says so, leaves nobody, and what was learnt is kept."""

import signal
from pathlib import Path

import pytest

from runs import scenario

GATED_REWARD = """
import time
from pathlib import Path

calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    Path({folder!r}, f"called-{{calls}}").touch()
    if calls == {at}:
        deadline = time.monotonic() + 300
        while not Path({folder!r}, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    return [float("7" in completion) for completion in completions]
"""


def gate(folder: Path, at: int) -> str:
    """A reward that notes each call, and waits in one of them until the file `go` exists."""
    folder.mkdir()
    return GATED_REWARD.format(folder=str(folder), at=at)


@scenario
def interrupted_preparing(lab):
    run = lab.fake("model.name=builtin:tiny-random-llama", cache=True)
    run.until(lambda: any("trainer_env.models.conversion" in words for words in run.living().values()), "it converts")
    run.interrupt()
    return run.finish()


@scenario
def interrupted_server_starting(lab):
    run = lab.fake(fault="slow-start:600,has-child")
    run.journals("start")
    run.interrupt()
    return run.finish()


@scenario
def interrupted_loading(lab):
    run = lab.fake(fault="slow-start:600")
    run.until(lambda: "libtorch" in Path(f"/proc/{run.process.pid}/maps").read_text(), "torch is loaded")
    run.interrupt(signal.SIGTERM)
    return run.finish()


@scenario
def interrupted_waiting(lab):
    run = lab.fake(fault="never-listens,ignores-sigterm")
    run.says("the trainer's model is loaded")
    run.interrupt()
    return run.finish()


@scenario
def interrupted_evaluating(lab):
    run = lab.fake("evaluation.before=true", fault="hangs")
    run.journals("asked")
    run.interrupt(signal.SIGTERM)
    return run.finish()


@scenario
def interrupted_twice(lab):
    run = lab.fake(fault="hangs,ignores-sigterm,has-child")
    run.journals("asked")
    run.interrupt()
    run.says("once more to stop now")
    run.interrupt()
    return run.finish()


@scenario
def interrupted_rollout(lab):
    go = lab.folder / "interrupted-rollout-go"
    run = lab.fake(fault=f"holds:{go}")
    run.journals("asked")
    run.rival = lab.fake(output_dir=run.output_dir).finish()
    run.interrupt(signal.SIGTERM)
    run.says("stopping after this step")
    go.touch()
    return run.finish()


@scenario
def interrupted_step(lab):
    folder = lab.folder / "interrupted-step"
    run = lab.fake("grpo.max_steps=4", reward=gate(folder, at=2))
    run.until((folder / "called-2").exists, "the second step's reward")
    run.interrupt()
    run.says("stopping after this step")
    (folder / "go").touch()
    run.finish()
    run.resumed = lab.resume(run).finish()
    return run


AT_ONCE = [
    "interrupted_preparing",
    "interrupted_server_starting",
    "interrupted_loading",
    "interrupted_waiting",
    "interrupted_evaluating",
    "interrupted_twice",
]
AFTER_THE_STEP = ["interrupted_rollout", "interrupted_step"]


@pytest.mark.parametrize("run", AT_ONCE, indirect=True)
def test_an_interrupt_ends_a_run_at_once_and_is_named(run):
    assert run.code == 130, run.report()
    assert run.stderr.strip().endswith("tandem-train: interrupted; nothing is left running.")
    assert "Traceback" not in run.stdout + run.stderr


@pytest.mark.parametrize("run", AFTER_THE_STEP, indirect=True)
def test_an_interrupt_while_training_waits_for_the_step(run):
    assert run.code == 130, run.report()
    last = run.steps[-1]
    total = 4 if last == 2 else 3
    assert f"tandem-train: interrupted after step {last} of {total}; nothing is left running." in run.stderr
    assert f"--resume run --set output_dir={run.output_dir}" in run.stderr
    assert "Traceback" not in run.stdout + run.stderr


@pytest.mark.parametrize("run", [*AT_ONCE, *AFTER_THE_STEP], indirect=True)
def test_nobody_lives_when_the_command_has_ended(run):
    assert run.left == {}


@pytest.mark.parametrize("run", [*AT_ONCE, *AFTER_THE_STEP], indirect=True)
def test_nothing_is_left_in_memory_and_no_address_is_published(run):
    assert not (run.run_dir / "connection.json").exists()
    log = run.run_dir / "server.log"
    folders = [str(path) for path in Path("/dev/shm").glob("tandem-*")]
    assert not [folder for folder in folders if log.exists() and folder in log.read_text()]


def test_an_interrupt_while_a_model_is_made_leaves_no_half_of_it(interrupted_preparing):
    assert not list(interrupted_preparing.cache.rglob("config.json"))
    assert not interrupted_preparing.run_dir.exists()


@pytest.mark.parametrize("run", AFTER_THE_STEP, indirect=True)
def test_the_step_that_was_being_taken_is_kept(run):
    assert run.checkpoints == [f"checkpoint-{run.steps[-1]}"]
    assert run.summary["steps"] == run.steps[-1]
    assert (run.run_dir / "adapter" / "adapter_model.safetensors").is_file()


def test_a_resumed_run_takes_the_other_steps_once(interrupted_step):
    resumed = interrupted_step.resumed
    assert resumed.code == 0, resumed.report()
    assert resumed.steps == [1, 2, 3, 4]
    assert [step["version"] for step in resumed.metrics] == [1, 2, 3, 4]
    assert resumed.summary["steps"] == 4
    assert resumed.left == {}


def test_a_resumed_run_publishes_before_it_samples(interrupted_step):
    resumed = interrupted_step.resumed
    assert resumed.journal("load")[0]["name"] == "policy-v000002"
    rollouts = [entry["model"] for entry in resumed.journal("generated") if entry["n"] > 1]
    assert rollouts[0] == "policy-v000002"


def test_a_second_trainer_in_the_same_folder_is_refused_and_disturbs_nobody(interrupted_rollout):
    rival = interrupted_rollout.rival
    assert rival.code == 2
    assert "Another tandem-train is at work in" in rival.stderr
    assert "--run NAME" in rival.stderr
    assert (rival.run_dir / "connection.json").exists()
    assert interrupted_rollout.steps == [1]
