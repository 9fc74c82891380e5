"""A session around its training: what it is when one has ended or failed."""

import gc
import sys
import traceback
import weakref
from pathlib import Path

import pytest

from bridge.errors import BridgeError
from trainer_env import config
from trainer_env import session as module
from trainer_env.placement import Placement
from trainer_env.runs.run_folder import RunLock
from trainer_env.session import Session


@pytest.fixture
def session(tmp_path, monkeypatch, request) -> Session:
    """One that holds its run, and whose server nobody has started."""
    (tmp_path / "server-vllm").symlink_to(sys.prefix)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path))
    demo = Path(request.config.rootpath) / "configs" / "demo.toml"
    overrides = [f'output_dir="{tmp_path}"', 'run="run"', 'tracking.display="none"']
    session = Session(config.load(demo, overrides), Placement(mode="cpu"))
    session._lock = RunLock(session.config)
    return session


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
