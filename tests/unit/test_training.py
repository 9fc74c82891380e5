"""A run's training, as far as it goes without the libraries that train."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_env import training
from trainer_env.training import Training, grpo
from trainer_env.training.interrupts import Interrupts


def made(tmp_path, **parts: Any) -> Training:
    """A training whose parts are as little as a test needs."""
    nothing: dict[str, Any] = dict.fromkeys(Training.__dataclass_fields__)
    nothing["config"] = SimpleNamespace(run_dir=tmp_path)
    nothing["placement"] = SimpleNamespace(trainer_environment=dict)
    nothing["display"] = SimpleNamespace(status=lambda _: None)
    nothing["interrupts"] = Interrupts(lambda _: None)
    return Training(**nothing | parts)


def test_a_ctrl_c_while_libraries_are_imported_comes_when_they_are(tmp_path, monkeypatch):
    imported, loaded = [], []

    def imports() -> None:
        signal.raise_signal(signal.SIGINT)
        imported.append(True)

    monkeypatch.setattr(training, "confine", lambda _: None)
    monkeypatch.setattr(grpo, "import_unsloth", imports)
    monkeypatch.setattr(grpo, "load_policy", lambda *_: loaded.append(True))
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path)._load_policy()
    assert (imported, loaded) == ([True], [])
