"""A run's server outlives its trainer, and a run outlives its server: taken over, left alone, replaced, ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

import lora_files
from bridge import guard
from bridge import protocol as p
from bridge.blocking import BlockingClient
from bridge.endpoint import read_connection
from bridge.errors import BridgeError, ConfigError, EngineFailed, PeerDied, Refused
from bridge.process import family_of, wait_until_gone
from served import FAKE, ROOT, generate, tiny_model
from trainer_env import serving as module
from trainer_env.config import load
from trainer_env.devices import Devices
from trainer_env.placement import plan
from trainer_env.runs.checkpoints import NEEDED
from trainer_env.runs.records import Best
from trainer_env.session import Session
from trainer_to_kill import serving

PROMPT = [5, 6, 7, 8]
JOB = """
output_dir = "{output_dir}"
run = "run"
model.name = "{model}"
placement.mode = "cpu"
rewards = [{{ function = "integer_answer" }}]
[server]
engine_command = {engine}
context_length = 512
keep_server_s = {keep}
seed = {seed}
lease_s = {lease}
attach_within_s = {attach}
"""


def until(condition, what, timeout_s=90.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def client_threads():
    return sum(thread.name == "tandem-bridge" for thread in threading.enumerate())


class InterruptedPopen(subprocess.Popen):
    """A Ctrl-C comes when the child lives, and has no name yet."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        signal.raise_signal(signal.SIGINT)


class Lab:
    """Sessions of one run, each as far as its server goes, and trainers that are killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "runs" / "run"
        self.model = tiny_model(folder / "model")
        self.said: list[str] = []
        self.known: dict[int, int] = {}
        self._serving = []
        self._trainers = []

    def job(self, *, keep=60.0, seed=0, lease=120.0, attach=120.0) -> Path:
        path = self.folder / "job.toml"
        output_dir = self.run_dir.parent
        path.write_text(
            JOB.format(
                output_dir=output_dir,
                model=self.model,
                engine=json.dumps(FAKE),
                keep=keep,
                seed=seed,
                lease=lease,
                attach=attach,
            )
        )
        return path

    def serving(self, **how):
        it = serving(self.job(**how))
        it._say = self.said.append
        self._serving.append(it)
        return it

    def start(self, *, anew=True, **how):
        it = self.serving(**how)
        it.start(str(self.model), anew=anew)
        it.connect()
        self.note()
        return it

    def killed_trainer(self, *words, **how) -> None:
        """A trainer has started a server, and was killed."""
        command = [sys.executable, ROOT / "tests" / "trainer_to_kill.py", self.job(**how), self.model, *words]
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
        self._trainers.append(trainer)
        assert trainer.stdout
        for line in trainer.stdout:
            if line == "ready\n":
                break
        self.known |= family_of(trainer.pid)
        trainer.kill()  # It is not collected: a parent that does not look must not keep others out.
        until(lambda: guard.living(trainer.pid) is None, "the trainer is dead")

    def publish(self, it, version):
        adapter = lora_files.make(self.model, version)
        return it.client.ask(adapter.publish(version), adapter.data)

    @property
    def pid(self) -> int:
        return read_connection(self.run_dir / "connection.json").pid

    def note(self) -> None:
        self.known |= family_of(os.getpid())

    def kill_server(self) -> int:
        self.note()
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        return pid

    def journal(self, event):
        path = self.folder / "journal.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def left(self) -> list[int]:
        return wait_until_gone(self.known, 90)

    def close(self) -> None:
        for it in self._serving:
            it.close(now=True)
        for trainer in self._trainers:
            trainer.communicate()
        assert self.left() == []


@pytest.fixture
def lab(tmp_path, monkeypatch):
    venvs = tmp_path / "venvs"
    venvs.mkdir()
    (venvs / "server-vllm").symlink_to(sys.prefix)
    monkeypatch.setenv("TANDEM_VENVS", str(venvs))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TANDEM_FAKE_JOURNAL", str(tmp_path / "journal.jsonl"))
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "")
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def test_a_server_that_nobody_has_asked_is_kept_no_longer_than_any_other(lab):
    it = lab.serving(attach=0.3, keep=0.5)
    it.start(str(lab.model), anew=True)
    until((lab.run_dir / "connection.json").exists, "the server is ready")
    lab.note()
    it.keep()
    assert lab.left() == []


def test_a_server_that_is_not_ready_is_not_kept(lab):
    it = lab.serving()
    it.start(str(lab.model), anew=True)
    it.keep()
    lab.note()
    it.close()
    assert lab.left() == []
    assert "it is ended" in lab.said[-1]


def test_a_server_waits_for_its_trainer_however_long_that_loads(lab):
    it = lab.serving(attach=0.3, keep=0.0)
    it.start(str(lab.model), anew=True)
    path = lab.run_dir / "connection.json"
    until(path.exists, "the server is ready")
    loaded_at = time.monotonic() + 3
    until(lambda: time.monotonic() > loaded_at, "the trainer has loaded")
    assert it.connect().ask(generate(PROMPT)).completions


def test_a_server_may_take_as_long_to_start_as_its_settings_say(lab, monkeypatch):
    waits = []
    it = lab.serving()
    monkeypatch.setattr(it._process, "wait_ready", lambda timeout_s: waits.append(timeout_s) or stop())
    it._config.server["startup_timeout_s"] = 5000.0

    def stop():
        raise EngineFailed("It is enough to know how long it would be waited for.")

    with pytest.raises(EngineFailed):
        it.connect()
    assert waits[0] > 5000


# ---- taken over ------------------------------------------------------------------------------------------------------


def test_a_server_that_was_kept_is_gone_on_with_at_once_and_ended_by_whoever_did(lab):
    first = lab.start()
    lab.publish(first, 3)
    pid = lab.pid
    first.keep()
    second = lab.start(anew=False)
    assert lab.pid == pid
    assert second.client.welcome.version == 3
    assert lab.publish(second, 2).version == 2  # A checkpoint may be older than what the server has.
    assert second.client.ask(generate(PROMPT)).version == 2
    assert len(lab.journal("start")) == 1
    second.close()
    assert lab.left() == []
    assert not list(lab.run_dir.glob("connection.json"))


def test_a_server_whose_trainer_was_killed_is_taken_over_within_its_lease(lab):
    lab.killed_trainer("connect", keep=0.0, lease=600.0)
    pid = lab.pid
    it = lab.start(anew=False, keep=0.0, lease=600.0)
    assert lab.pid == pid
    assert lab.publish(it, 1).version == 1
    assert len(lab.journal("start")) == 1
    assert lab.said == ["going on with the server that the last trainer of this run has left"]


def test_a_server_that_was_starting_when_its_trainer_was_killed_is_waited_for(lab, monkeypatch):
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "slow-start:2")
    lab.killed_trainer()
    it = lab.start(anew=False)
    assert it.client.ask(generate(PROMPT)).completions
    assert len(lab.journal("start")) == 1


def test_a_server_with_other_settings_is_ended_and_they_are_named(lab):
    lab.killed_trainer("connect")
    pid = lab.pid
    lab.start(anew=False, seed=7)
    assert lab.pid != pid
    assert "other settings (server.seed)" in lab.said[0]
    assert guard.living(pid) is None


def test_a_server_that_another_process_holds_is_not_taken_over_and_not_ended(lab):
    first = lab.start()
    second = lab.serving()
    with pytest.raises(Refused, match=r"Run 'run' .* holds this server"):
        second.start(str(lab.model), anew=False)
    second.close()
    assert first.client.ask(generate(PROMPT)).completions


def test_a_pid_that_has_come_to_mean_another_process_is_left_alone(lab):
    lab.killed_trainer("connect")
    record = lab.run_dir / "server_process.json"
    left = json.loads(record.read_text())
    os.kill(left["pid"], signal.SIGKILL)
    assert lab.left() == []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        record.write_text(json.dumps(left | {"pid": other.pid}))
        it = lab.start(anew=False)
        assert it.client.ask(generate(PROMPT)).completions
        it.close()
        assert other.poll() is None
        other.communicate(b"\n")


def test_a_run_that_begins_does_not_go_on_with_a_server_that_has_learnt(lab):
    lab.killed_trainer("connect")
    it = lab.start(anew=True)
    assert it.client.welcome.version == 0
    assert len(lab.journal("start")) == 2


def test_a_server_that_dies_while_it_is_taken_over_is_replaced(lab, monkeypatch):
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "slow-start:2@1")
    lab.killed_trainer()
    it = lab.serving()
    it.start(str(lab.model), anew=False)
    os.kill(json.loads((lab.run_dir / "server_process.json").read_text())["pid"], signal.SIGKILL)
    it.connect()
    assert it.client.ask(generate(PROMPT)).completions


def test_a_session_ends_its_server_unless_it_is_told_to_keep_it(lab):
    def session():
        config = load(lab.job(), ['tracking.display="none"'])
        return Session(config, plan(config.placement, Devices(cores=2)))

    with session() as first:
        first.start()
        first._serving.connect()
        lab.note()
        pid = lab.pid
        first.close(keep_server=True)
    assert guard.living(pid)
    with session() as second:
        second.start()
        assert lab.pid == pid
        assert second._serving.client.ask(p.Status()).restarts == 0
    assert lab.left() == []


def test_without_time_to_wait_a_server_is_not_kept(lab):
    it = lab.start(keep=0.0)
    with pytest.raises(ConfigError, match="keep_server_s is 0"):
        it.keep()
    assert it.client.ask(p.Ping())


def test_a_server_that_was_kept_and_not_fetched_ends(lab):
    lab.start(keep=0.5).keep()
    assert lab.left() == []


def test_a_server_in_whose_birth_somebody_interrupts_is_ended_with_the_run(lab, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    it = lab.serving()
    try:
        with pytest.raises(KeyboardInterrupt):
            it.start(str(lab.model), anew=True)
    finally:
        signal.signal(signal.SIGINT, before)
        lab.note()
    it.close(now=True)
    assert lab.left() == []


# ---- held anew -------------------------------------------------------------------------------------------------------


def broken_off(monkeypatch, *, admitted):
    """The next attempt to attach is interrupted: before the server has heard of it, or after it has agreed."""
    connect = BlockingClient.connect

    def interrupted(*arguments, **options):
        monkeypatch.setattr(BlockingClient, "connect", connect)
        if admitted:
            connect(*arguments, **options).close()
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingClient, "connect", interrupted)


@pytest.mark.parametrize("admitted", [False, True])
def test_an_interrupt_while_a_server_is_held_anew_costs_nobody_the_server(lab, monkeypatch, admitted):
    it = lab.start()
    lab.publish(it, 3)
    broken_off(monkeypatch, admitted=admitted)
    with pytest.raises(KeyboardInterrupt):
        it.begin_anew()
    it.connect()
    assert lab.publish(it, 2).version == 2
    assert it.begin_anew().ask(generate(PROMPT)).version == 2
    assert client_threads() == 1


def test_an_interrupt_while_the_old_client_is_closed_costs_nobody_the_server(lab, monkeypatch):
    it = lab.start()
    lab.publish(it, 3)
    close, left = BlockingClient.close, []

    def interrupted(client):
        monkeypatch.setattr(BlockingClient, "close", close)
        left.append(client)
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockingClient, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        it.begin_anew()
    assert lab.publish(it, 2).version == 2
    left[0].close()


def test_a_server_that_dies_while_it_is_held_anew_is_replaced(lab, monkeypatch):
    it = lab.start()
    lab.publish(it, 3)

    def dies(*_, **__):
        patched.undo()
        lab.kill_server()
        until(it.died, "it is dead")
        raise PeerDied("It is gone.")

    with monkeypatch.context() as patched:
        patched.setattr(it, "_attach", dies)
        with pytest.raises(PeerDied):
            it.begin_anew()
    assert it.connect().ask(generate(PROMPT)).version == 3


@pytest.mark.parametrize("kept", [False, True])
def test_an_interrupt_while_a_server_is_attached_to_does_not_lock_its_own_process_out(lab, monkeypatch, kept):
    if kept:
        lab.start().keep()
    it = lab.serving()
    broken_off(monkeypatch, admitted=True)

    def begin():
        it.start(str(lab.model), anew=False)  # Which attaches to one that was kept.
        it.connect()

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert it.connect().ask(generate(PROMPT)).completions
    assert len(lab.journal("start")) == 1


def test_a_session_whose_beginning_anew_was_interrupted_is_asked_and_trains_all_the_same(lab, monkeypatch):
    config = load(lab.job(), ['tracking.display="none"'])
    with Session(config, plan(config.placement, Devices(cores=2)), by_hand=True) as session:
        session.start()
        session.status()
        lab.note()
        lab.publish(session._serving, 3)
        checkpoint = lab.run_dir / "checkpoints" / "checkpoint-2"
        checkpoint.mkdir(parents=True)
        for name in NEEDED:
            (checkpoint / name).write_text('{"global_step": 2}')
        broken_off(monkeypatch, admitted=True)
        with pytest.raises(KeyboardInterrupt):
            session._go_on(config)
        assert session.status().version == 3
        session._go_on(config)
        session.status()
        assert lab.publish(session._serving, 2).version == 2


def interrupted():
    raise KeyboardInterrupt


def test_a_session_that_was_broken_off_before_its_first_checkpoint_begins_with_another_server(lab, monkeypatch):
    config = load(lab.job(), ['tracking.display="none"'])
    with Session(config, plan(config.placement, Devices(cores=2)), by_hand=True) as session:
        session.start()
        session.status()
        lab.note()
        lab.publish(session._serving, 1)
        session._go_on(config)
        with monkeypatch.context() as patched:
            patched.setattr(session._serving, "_start_again", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.status()
        assert session.status().version == 0
        lab.note()
        session._go_on(config)
        session.status()
        assert lab.publish(session._serving, 1).version == 1
        assert len(lab.journal("start")) == 2


def test_a_session_that_has_not_reached_a_server_yet_begins_with_one_that_has_learnt_nothing(lab, monkeypatch):
    config = load(lab.job(), ['tracking.display="none"'])

    def session():
        return Session(config, plan(config.placement, Devices(cores=2)), by_hand=True)

    with session() as first:
        first.start()
        first.status()
        lab.publish(first._serving, 1)
        first.close(keep_server=True)
    with session() as second:
        broken_off(monkeypatch, admitted=True)
        with pytest.raises(KeyboardInterrupt):
            second.start()
        second._go_on(config)
        assert second.status().version == 0
        lab.note()


class Tokenizer:
    """Of the tiny model, which has none: token 5, whatever the text."""

    eos_token_id = 2

    def __call__(self, _text, **_):
        return {"input_ids": [5]}

    def decode(self, token_ids, **_):
        return f"{len(token_ids)} tokens"


def test_a_run_goes_on_from_a_step_of_which_another_adapter_is_served_as_the_best(lab, monkeypatch):
    tokenizing = SimpleNamespace(load=lambda _: Tokenizer())
    monkeypatch.setitem(sys.modules, "trainer_env.models.tokenizing", tokenizing)
    config = load(lab.job(), ['tracking.display="none"', "data.chat=false", 'data.system_prompt=""'])
    checkpoint = lab.run_dir / "checkpoints" / "checkpoint-2"
    lora_files.make(lab.model, 2).write(checkpoint)
    for name in NEEDED[1:]:
        (checkpoint / name).write_text(json.dumps({"global_step": 2}))
    best = lora_files.make(lab.model, 7).write(lab.run_dir / "best")
    (best / "best.json").write_bytes(msgspec.json.encode(Best(step=2, reward_mean=0.9, version=2)))
    with Session(config, plan(config.placement, Devices(cores=2)), by_hand=True) as session:
        session.start()
        (answer,) = session.generate("5", max_tokens=2, version=2)
        lab.note()
        assert answer.version == 2
        session._go_on(config)
        session.status()
        assert lab.publish(session._serving, 2).version == 2  # What training does first.
        assert len(lab.journal("load")) == 2


def test_a_session_is_asked_under_saved_versions_in_any_order(lab, monkeypatch):
    tokenizing = SimpleNamespace(load=lambda _: Tokenizer())
    monkeypatch.setitem(sys.modules, "trainer_env.models.tokenizing", tokenizing)
    config = load(lab.job(), ['tracking.display="none"', "data.chat=false", 'data.system_prompt=""'])
    for step in (2, 4):
        checkpoint = lab.run_dir / "checkpoints" / f"checkpoint-{step}"
        lora_files.make(lab.model, step).write(checkpoint)
        for name in NEEDED[1:]:
            (checkpoint / name).write_text(json.dumps({"global_step": step}))
    with Session(config, plan(config.placement, Devices(cores=2)), by_hand=True) as session:
        session.start()

        def version(asked):
            (answer,) = session.generate("5", max_tokens=2, version=asked)
            return answer.version

        answered = [version(asked) for asked in ("latest", 2, 2, "latest", "base", 2)]
        lab.note()
        assert answered == [4, 2, 2, 4, 0, 2]
        loaded = [entry["name"] for entry in lab.journal("load")]
        assert loaded == ["policy-v000004", "policy-v000002", "policy-v000004-2", "policy-v000002-2"]
        version(4)
        somebody_waits = session._asking_now()._ready("latest", may_come=False)
        with somebody_waits, pytest.raises(ConfigError, match="takes version 2 only in its place"):
            version(2)
        assert version(2) == 2


# ---- replaced --------------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_costs_nothing_but_time(lab, monkeypatch):
    gate = lab.folder / "gate"
    monkeypatch.setenv("TANDEM_FAKE_FAULT", f"holds:{gate}")
    it = lab.start()
    lab.publish(it, 4)
    lab.publish(it, 5)
    open_ = [it.client.submit(generate(PROMPT, n=2, min_version=5)) for _ in range(3)]
    until(lambda: lab.journal("asked"), "the engine is asked")
    old = lab.kill_server()
    late = it.client.submit(generate(PROMPT, min_version=5))
    gate.touch()
    answers = [future.result(200) for future in (*open_, late)]
    assert lab.pid != old
    assert [answer.version for answer in answers] == [5] * 4
    assert [len(answer.completions) for answer in answers] == [2, 2, 2, 1]
    engine = lab.journal("start")[-1]["pid"]
    sampled = [e["n"] for e in lab.journal("generated") if e["pid"] == engine and e["model"] == "policy-v000005"]
    assert sorted(sampled) == [1, 2, 2, 2]
    assert [entry["name"] for entry in lab.journal("load")] == ["policy-v000004", "policy-v000005", "policy-v000005"]
    assert lab.publish(it, 6).version == 6
    assert it.restarts() == 1
    assert it.restarts() == 0  # Since then.


def test_a_publish_that_was_under_way_is_done_after_the_one_before_it(lab):
    it = lab.start()
    lab.publish(it, 1)
    os.kill(lab.pid, signal.SIGSTOP)
    lab.note()
    adapter = lora_files.make(lab.model, 2)
    publishing = it.client.submit(adapter.publish(2), adapter.data)
    os.kill(lab.pid, signal.SIGKILL)
    assert publishing.result(200).version == 2
    assert [entry["name"] for entry in lab.journal("load")] == ["policy-v000001", "policy-v000001", "policy-v000002"]


def test_servers_that_die_again_and_again_end_the_run_in_seconds(lab, monkeypatch):
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "hangs")
    it = lab.start()
    answer = it.client.submit(generate(PROMPT, deadline_s=600.0))
    for times in range(1, 2 + module.MAX_RESTARTS):
        until(lambda times=times: len(lab.journal("asked")) == times, f"it is asked for the {times}. time")
        lab.kill_server()
    with pytest.raises(BridgeError, match="was killed by SIGKILL") as ended:
        answer.result(100)
    assert len(lab.journal("start")) == 1 + module.MAX_RESTARTS
    assert "3 times without a step" in ended.value.why
    assert ended.value.log_path == str(lab.run_dir / "server.log")
    assert ended.value.log_tail
    with pytest.raises(BridgeError, match="was killed by SIGKILL"):
        it.client.ask(p.Ping())


def test_a_step_between_them_starts_the_count_anew(lab):
    it = lab.start()
    for version in range(1, 3 + module.MAX_RESTARTS):
        assert lab.publish(it, version).version == version
        lab.kill_server()
    assert it.client.ask(generate(PROMPT)).version == 2 + module.MAX_RESTARTS
    assert it.restarts() == 2 + module.MAX_RESTARTS


def test_a_server_that_says_why_it_ended_is_not_started_again(lab):
    it = lab.start()
    failure = lab.run_dir / "server_failure.json"
    failure.write_text(json.dumps({"type": "Failure", "code": "engine-failed", "what": "The engine has had enough."}))
    lab.kill_server()
    with pytest.raises(BridgeError, match="has had enough"):
        it.client.ask(generate(PROMPT))


@pytest.mark.parametrize("now", [False, True])
def test_a_run_that_ends_while_a_server_is_started_again_leaves_nobody(lab, monkeypatch, now):
    it = lab.start()
    address = read_connection(lab.run_dir / "connection.json").data
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "slow-start:600,has-child")
    lab.kill_server()
    answer = it.client.submit(generate(PROMPT))
    until(lambda: lab.journal("child"), "another engine starts")
    lab.note()
    it.close(now=now)
    assert len(lab.journal("start")) == 2
    assert not Path(address.removeprefix("ipc://")).parent.exists()
    with pytest.raises(PeerDied):
        answer.result(0)
    assert lab.left() == []


def test_a_server_that_dies_as_it_is_kept_is_not_started_again(lab, monkeypatch):
    it = lab.start()
    start_again, let_go, gone = it._start_again, it._process.let_go, threading.Event()

    def started_late():
        assert gone.wait(30)
        start_again()

    def lets_go():
        let_go()
        gone.set()

    monkeypatch.setattr(it, "_start_again", started_late)
    monkeypatch.setattr(it._process, "let_go", lets_go)
    lab.kill_server()
    answer = it.client.submit(generate(PROMPT))
    until(lambda: it.client._renewal, "it is missed")
    it.keep()
    with pytest.raises(PeerDied):
        answer.result(30)
    assert not it._process.alive
    assert lab.left() == []


def test_a_question_that_was_cancelled_is_not_asked_again(lab, monkeypatch):
    monkeypatch.setenv("TANDEM_FAKE_FAULT", "hangs@1")
    it = lab.start()
    answer = it.client.submit(generate(PROMPT))
    until(lambda: lab.journal("asked"), "the engine is asked")
    lab.kill_server()
    assert answer.cancel()
    it.client.ask(p.Ping(deadline_s=100))
    assert len(lab.journal("asked")) == 1


def test_questions_of_many_threads_survive_a_server(lab):
    it = lab.start()
    lab.publish(it, 1)
    answers, errors = [], []

    def ask():
        try:
            for _ in range(10):
                answers.append(it.client.ask(generate(PROMPT, max_tokens=1)).version)  # noqa: PERF401 (kept on failure)
        except BridgeError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) > 5, "some are answered")
    lab.kill_server()
    for thread in threads:
        thread.join(200)
    assert errors == []
    assert answers == [1] * 40
