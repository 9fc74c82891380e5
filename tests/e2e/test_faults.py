"""What dies or misbehaves in the middle of a run, and what becomes of the run."""

import math
import os
import signal
import socket

import pytest

from bridge.endpoint import read_connection
from runs import scenario

CLOSES = """
from pathlib import Path

calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    if calls == 1:
        Path({go!r}).unlink()
    return [float(row % 2) for row in range(len(completions))]
"""
"""The first reward lets the engine wait with the next rollout. Every step has something to learn from."""

ARMED = """
from pathlib import Path

def reward(completions, **columns):
    if Path({armed!r}).exists():
        Path({go!r}).unlink(missing_ok=True)
    return [float(row % 2) for row in range(len(completions))]
"""
"""While a file `armed` exists, the engine waits with every rollout that comes after a reward."""

KILLS = """
import os, signal
from pathlib import Path

calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    if calls == {at} and not Path({killed!r}).exists():
        Path({killed!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(row % 2) for row in range(len(completions))]
"""


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
    """In the middle of the second rollout."""
    go = lab.folder / "server-killed-go"
    go.touch()
    run = lab.fake("evaluation.after=true", reward=CLOSES.format(go=str(go)), fault=f"holds:{go}")
    run.until(lambda: asked_after_loading(run, "policy-v000001"), "the engine is asked under the first version")
    os.kill(server_pid(run), signal.SIGKILL)
    go.touch()
    return run.finish()


@scenario
def servers_killed(lab):
    """Whenever one is asked, until none is started again."""
    run = lab.fake(fault="hangs,ignores-sigterm,has-child")
    for times in range(1, 5):
        run.until(lambda times=times: lives_asked(run) == times, f"engine {times} is asked")
        os.kill(server_pid(run), signal.SIGKILL)
    return run.finish()


def asked_after_loading(run, adapter):
    events = [entry.get("name", entry["event"]) for entry in run.journal()]
    return adapter in events and "asked" in events[events.index(adapter) :]


def server_pid(run):
    return read_connection(run.run_dir / "connection.json").pid


def lives_asked(run):
    """Engines that were asked for completions."""
    return len({entry["pid"] for entry in run.journal("asked")})


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
    first = lab.fake(*job, "server.lease_s=10", reward=armed(go), fault=f"holds:{go}")
    kill_after_the_first_step(first, go)
    first.gone().expected_to_live = False
    first.finish()
    second = lab.resume(first, "server.lease_s=600", fault=f"holds:{go}")
    kill_after_the_first_step(second, go)
    second.finish()
    second.server = server_pid(second)
    go.touch()
    third = lab.resume(second).finish()
    second.gone().expected_to_live = False
    return first, second, third


@scenario
def trainer_killed_and_changed(lab):
    """Gone on with under another seed, which the server that was left does not have."""
    go = lab.folder / "trainer-killed-and-changed-go"
    first = lab.fake("grpo.save_steps=1", "server.lease_s=600", reward=armed(go), fault=f"holds:{go}")
    kill_after_the_first_step(first, go)
    first.finish()
    second = lab.resume(first, "server.seed=5").finish()
    first.gone().expected_to_live = False
    return first, second


@scenario
def trainer_killed_behind(lab):
    """Killed in its fourth reward: the server has version 3, and the last checkpoint is that of step 2."""
    killed = lab.folder / "trainer-killed-behind"
    reward = KILLS.format(at=4, killed=str(killed))
    first = lab.fake("grpo.max_steps=5", "grpo.save_steps=2", "server.lease_s=600", reward=reward)
    first.expected_to_live = True
    first.finish()
    second = lab.resume(first).finish()
    first.gone().expected_to_live = False
    return first, second


def armed(go):
    """The reward that closes an engine's gate again, as long as a run is to be killed."""
    return ARMED.format(armed=f"{go}-armed", go=str(go))


def kill_after_the_first_step(run, go):
    """Let one step be taken, then kill the trainer while it waits for the next one's completions."""
    arms = go.with_name(f"{go.name}-armed")
    arms.touch()
    run.journals("asked")
    before = len(run.steps)
    go.touch()
    run.until(lambda: len(run.steps) > before, "a step is taken")
    run.until(lambda: waits(run), "it asks again")
    run.expected_to_live = True
    run.process.kill()
    run.process.wait()
    arms.unlink()


def waits(run):
    """Whether a question of the trainer's is open. The engine notes no question that begins with token 1."""
    answered = [entry for entry in run.journal("generated") if entry["prompt"][0] != 1]
    return len(run.journal("asked")) > len(answered)


def test_a_killed_engine_costs_nothing_but_time(engine_killed):
    assert engine_killed.code == 0, engine_killed.report()
    assert engine_killed.steps == [1, 2, 3]
    assert [step["version"] for step in engine_killed.metrics] == [1, 2, 3]
    assert engine_killed.summary["restarts"] == 1


def test_a_killed_engine_is_named_in_the_trainers_log(engine_killed):
    log = (engine_killed.run_dir / "trainer.log").read_text()
    assert "an engine died, and is started again" in log
    assert "an engine is back" in log


def test_an_engine_that_shifts_its_logprobs_shows_in_the_first_ratio(engine_killed):
    assert engine_killed.metrics[0]["ratio_mean"] == pytest.approx(math.exp(-0.1), abs=5e-3)
    assert "importance ratio of an on-policy batch is 0.90" in (engine_killed.run_dir / "trainer.log").read_text()


def test_a_killed_server_costs_nothing_but_time(server_killed):
    assert server_killed.code == 0, server_killed.report()
    assert server_killed.steps == [1, 2, 3]
    assert [step["version"] for step in server_killed.metrics] == [1, 2, 3]
    assert [step["staleness"] for step in server_killed.metrics] == [0, 0, 0]
    assert server_killed.summary["restarts"] == 1
    assert "tandem-server is gone: another one is started" in server_killed.stdout


def test_the_next_server_gets_the_last_adapter_and_the_open_questions_once(server_killed):
    engines = [entry["pid"] for entry in server_killed.journal("start")]
    assert len(engines) == 2
    loads = [entry["name"] for entry in server_killed.journal("load") if entry["pid"] == engines[1]]
    assert [name for name in loads if not name.startswith("canary")][:2] == ["policy-v000001", "policy-v000002"]
    assert any(name.startswith("canary") for name in loads), "the new server is proven anew"
    groups = [entry for entry in server_killed.journal("generated") if entry["pid"] == engines[1] and entry["n"] == 2]
    assert [entry["model"] for entry in groups] == ["policy-v000001"] * 2 + ["policy-v000002"] * 2


def test_servers_that_are_killed_again_and_again_end_the_run_with_their_log(servers_killed):
    assert servers_killed.code == 1, servers_killed.report()
    assert "tandem-server was killed by SIGKILL" in servers_killed.stderr
    assert "started again 3 times without a step" in servers_killed.stderr
    log = servers_killed.output_dir / "run" / "server.log"
    assert f"log: {log}" in servers_killed.stderr
    assert log.read_text().splitlines()[-1] in servers_killed.stderr
    assert "Traceback" not in servers_killed.stderr


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
    "run",
    ["engine_killed", "server_killed", "servers_killed", "engine_dies_at_start", "load_refused", "port_in_use"],
    indirect=True,
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


def test_a_resumed_run_goes_on_with_the_server_that_still_waits_for_its_killed_trainer(trainer_killed):
    _, second, third = trainer_killed
    assert second.server in second.left
    assert "going on with the server that the last trainer of this run has left" in third.stdout
    assert len(second.journal("start")) == 1
    assert third.journal("start") == []
    assert third.left == {}


def test_a_resumed_run_ends_a_server_that_has_other_settings(trainer_killed_and_changed):
    _, second = trainer_killed_and_changed
    assert second.code == 0, second.report()
    assert "ending the server that the last trainer of this run has left: other settings (server.seed)" in second.stdout
    assert len(second.journal("start")) == 1
    assert second.steps == [1, 2, 3]
    assert second.left == {}


def test_a_server_that_is_ahead_of_the_last_checkpoint_goes_back_to_it(trainer_killed_behind):
    first, second = trainer_killed_behind
    assert first.code == -signal.SIGKILL
    assert first.steps == [1, 2, 3]
    assert second.code == 0, second.report()
    assert second.steps == [1, 2, 3, 4, 5]
    assert second.journal("start") == []
    names = [entry["name"] for entry in first.journal("load")]
    loads = [name for name in names if not name.startswith("canary")]
    assert loads == [
        *("policy-v000001", "policy-v000002", "policy-v000003"),
        *("policy-v000002-2", "policy-v000003-2", "policy-v000004", "policy-v000005"),
    ]
