"""A session as far as it goes without a server and a trainer: what it writes down, and what is left of a training."""

import gc
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import BridgeError, ConfigError, PeerDied
from trainer_env import config
from trainer_env import session as module
from trainer_env.placement import Placement
from trainer_env.runs.run_folder import RunLock
from trainer_env.serving import Serving
from trainer_env.session import Session


@pytest.fixture
def job(tmp_path, monkeypatch, request):
    """Makes sessions of one run."""
    (tmp_path / "server-vllm").symlink_to(sys.prefix)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path))
    demo = Path(request.config.rootpath) / "configs" / "demo.toml"

    def make(*overrides: str, **how: Any) -> Session:
        settings = [f'output_dir="{tmp_path}"', 'run="run"', 'tracking.display="none"', *overrides]
        return Session(config.load(demo, settings), Placement(mode="cpu"), **how)

    return make


@pytest.fixture
def session(job) -> Iterator[Session]:
    """One that holds its run, and whose server nobody has started."""
    session = job()
    session._lock = RunLock(session.config)
    yield session
    session.close()


@pytest.mark.parametrize(("metrics", "temperature"), [("", 1.5), ("{}\n", 0.5)])
def test_a_run_is_as_it_was_last_opened_until_it_is_trained(job, monkeypatch, metrics, temperature):
    monkeypatch.setattr(Serving, "start", lambda *_, **__: None)
    for asked in (0.5, 1.5):
        session = job(f"grpo.temperature={asked}", by_hand=True)
        session._model = "checked"
        session.start()
        (session.config.run_dir / "metrics.jsonl").write_text(metrics)
        session.close()
    assert config.load(session.config.run_dir / "config.toml").grpo.temperature == temperature


class Model:
    """A model and its trainer, which hold one another."""

    def __init__(self) -> None:
        self.trainer = self


@pytest.fixture
def _collected_by_hand():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collected_by_hand")
@pytest.mark.parametrize("fails", [False, True])
def test_a_training_that_has_ended_keeps_no_model(session, monkeypatch, fails):
    models = []

    class Trains:
        def __init__(self, **_):
            pass

        def run(self):
            model = Model()
            models.append(weakref.ref(model))
            try:
                if fails:
                    raise ValueError("it is not a number")
            except ValueError as error:
                raise BridgeError("It has failed.") from error
            return "summary"

    monkeypatch.setattr(module, "Training", Trains)
    if fails:
        with pytest.raises(BridgeError) as kept:
            session.train()
        assert "raise ValueError" in "".join(traceback.format_exception(kept.value))
    else:
        assert session.train() == "summary"
    assert models[0]() is None


class TrainsBeside(threading.Thread):
    """Trains a session in another thread, until it is asked to stop and its server is gone."""

    def __init__(self, session: Session, monkeypatch) -> None:
        super().__init__(daemon=True)
        self._session = session
        self.begun = threading.Event()
        self.held: list[bool] = []
        self.raised: BaseException | None = None
        monkeypatch.setattr(Session, "_trained", lambda *_: self.trains())
        self.start()
        assert self.begun.wait(60)

    def trains(self) -> None:
        self.begun.set()
        assert self._session._interrupts.stop.wait(60)
        time.sleep(0.2)  # It takes a moment to notice.
        self.held.append(self._session.is_open)
        raise PeerDied("The server was told to end.")

    def run(self) -> None:
        try:
            self._session.train()
        except BridgeError as error:
            self.raised = error


def test_closed_beside_its_training_a_session_holds_its_run_until_that_has_ended(session, monkeypatch):
    training = TrainsBeside(session, monkeypatch)
    session.close()
    training.join(60)
    assert training.held == [True]
    assert isinstance(training.raised, ConfigError)
    assert "closed while it trained" in str(training.raised)
    assert not session.is_open


def test_a_server_that_cannot_be_kept_ends_no_training(session, monkeypatch):
    training = TrainsBeside(session, monkeypatch)
    with pytest.raises(ConfigError, match="keep_server_s"):
        session.close(keep_server=True)
    assert not session._interrupts.stop.is_set()
    session.end_step()
    training.join(60)
    assert isinstance(training.raised, PeerDied)
    session.close()


def test_a_session_that_its_own_training_closes_does_not_wait_for_itself(session, monkeypatch):
    monkeypatch.setattr(module, "TRAINING_ENDS_S", 1e6)
    monkeypatch.setattr(Session, "_trained", lambda *_: session.close())
    training = threading.Thread(target=session.train, daemon=True)
    training.start()
    training.join(60)
    assert not training.is_alive()
