"""What dies or misbehaves in the middle of a run, and what becomes of the run."""

import math
import os
import signal
import socket

import pytest

from bridge.endpoint import read_connection
from runs import scenario


@scenario
def engine_killed(lab):
    """The engine reports logprobs that are 0.1 too high, is killed in the middle of a rollout, and comes back."""
    go = lab.folder / "engine-killed-go"
    run = lab.fake(f"model.name={lab.flat()}", "grpo.save_steps=1", fault=f"flat,shifts-logprobs,holds:{go}")
    run.journals("asked")
    os.kill(run.journal("start")[0]["pid"], signal.SIGKILL)
    go.touch()
    return run.finish()


@scenario
def server_killed(lab):
    run = lab.fake(fault="hangs,ignores-sigterm,has-child")
    run.journals("asked")
    os.kill(read_connection(run.run_dir / "connection.json").pid, signal.SIGKILL)
    return run.finish()


@scenario
def engine_dies_at_start(lab):
    return lab.fake(fault="dies-at-start").finish()


@scenario
def load_refused(lab):
    return lab.fake(fault="load-500").finish()


@scenario
def port_in_use(lab):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = lab.fake(f"server.listen=tcp://127.0.0.1:{taken.getsockname()[1]}")
        run.port = taken.getsockname()[1]
        return run.finish()


@scenario
def trainer_killed(lab):
    """Killed in its second rollout; killed again in the third, and gone on with while the server still waits for it."""
    go = lab.folder / "trainer-killed-go"
    job = ("grpo.max_steps=4", "grpo.save_steps=1")
    first = lab.fake(*job, "server.lease_s=2", fault=f"holds:{go}")
    kill_after_the_first_step(first, go)
    first.gone()
    first.finish()
    second = lab.resume(first, "server.lease_s=600", fault=f"holds:{go}")
    second.expected_to_live = True
    kill_after_the_first_step(second, go)
    second.finish()
    third = lab.resume(second).finish()
    second.gone().expected_to_live = False
    return first, second, third


def kill_after_the_first_step(run, go):
    """Let one step be taken, then kill the trainer while it waits for the next one's completions."""
    run.journals("asked")
    before = len(run.steps)
    go.touch()
    run.until(lambda: len(run.steps) > before, "a step is taken")
    go.unlink()
    asked = len(run.journal("asked"))
    run.until(lambda: len(run.journal("asked")) > asked or run.steps[-1] == 4, "it asks again")
    run.process.kill()
    go.unlink(missing_ok=True)


def test_a_killed_engine_costs_nothing_but_time(engine_killed):
    assert engine_killed.code == 0, engine_killed.report()
    assert engine_killed.steps == [1, 2, 3]
    assert [step["version"] for step in engine_killed.metrics] == [1, 2, 3]
    assert engine_killed.summary["restarts"] == 1


def test_a_killed_engine_is_named_in_the_trainers_log(engine_killed):
    log = (engine_killed.run_dir / "trainer.log").read_text()
    assert "the engine died, and is started again" in log
    assert "the engine is back" in log


def test_an_engine_that_shifts_its_logprobs_shows_in_the_first_ratio(engine_killed):
    assert engine_killed.metrics[0]["ratio_mean"] == pytest.approx(math.exp(-0.1), abs=5e-3)
    assert "importance ratio of an on-policy batch is 0.90" in (engine_killed.run_dir / "trainer.log").read_text()


def test_a_killed_server_ends_the_run_with_its_log(server_killed):
    assert server_killed.code == 1, server_killed.report()
    assert "tandem-server was killed by SIGKILL" in server_killed.stderr
    log = server_killed.output_dir / "run" / "server.log"
    assert f"log: {log}" in server_killed.stderr
    assert log.read_text().splitlines()[-1] in server_killed.stderr
    assert "Traceback" not in server_killed.stderr


def test_an_engine_that_cannot_start_ends_the_run_with_its_own_words(engine_dies_at_start):
    assert engine_dies_at_start.code == 1
    assert "ValueError: the fake engine does not like this model" in engine_dies_at_start.stderr
    assert "engine.log" in engine_dies_at_start.stderr
    assert "while it was starting" in engine_dies_at_start.stderr


def test_an_adapter_that_the_engine_refuses_ends_the_run(load_refused):
    assert load_refused.code == 1
    assert "this adapter is not to my taste" in load_refused.stderr
    assert "The canary, an adapter that the proof of sync makes, cannot be asked for" in load_refused.stderr
    assert "server.log" in load_refused.stderr
    assert load_refused.steps == []


def test_a_port_in_use_is_named(port_in_use):
    assert port_in_use.code in (1, 2)
    assert str(port_in_use.port) in port_in_use.stderr
    assert "in use" in port_in_use.stderr
    assert "Traceback" not in port_in_use.stderr


@pytest.mark.parametrize(
    "run", ["engine_killed", "server_killed", "engine_dies_at_start", "load_refused", "port_in_use"], indirect=True
)
def test_nobody_lives_when_the_command_has_ended(run):
    assert run.left == {}


def test_without_its_trainer_a_server_ends_when_the_lease_has_lapsed(trainer_killed):
    first, _, _ = trainer_killed
    assert "has been silent for" in (first.run_dir / "server.log").read_text()
    assert first.left == {}


def test_a_run_whose_trainer_was_killed_goes_on_from_its_checkpoint(trainer_killed):
    first, second, third = trainer_killed
    assert first.steps == [1]
    assert second.steps == [1, 2]
    assert third.code == 0, third.report()
    assert third.steps == [1, 2, 3, 4]
    assert [step["version"] for step in third.metrics] == [1, 2, 3, 4]


def test_a_resumed_run_ends_the_server_that_still_waits_for_its_killed_trainer(trainer_killed):
    _, second, third = trainer_killed
    assert second.left
    assert "ending the server that the last trainer of this run has left" in third.stdout
    assert third.left == {}
