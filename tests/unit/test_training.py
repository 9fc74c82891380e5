"""A run's training, as far as it goes without the libraries that train."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_env import config as configs
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


@pytest.mark.parametrize("stopped", [False, True])
def test_a_training_that_is_ended_while_it_loads_evaluates_nothing_and_takes_no_step(
    tmp_path, monkeypatch, request, stopped
):
    demo = Path(request.config.rootpath) / "configs" / "demo.toml"
    evaluated, enough = [], []

    def run(*_, **how: Any) -> Any:
        enough.append(how["enough"]())
        return SimpleNamespace(finished=False, step=0, adapter=None)

    monkeypatch.setattr(Training, "_rollouts", lambda *_: SimpleNamespace(sampler=None))
    monkeypatch.setattr(training, "evaluate_run", lambda *_, **how: evaluated.append(how["phase"]))
    monkeypatch.setattr(grpo, "run", run)
    it = made(
        tmp_path,
        config=configs.load(demo, [f'output_dir="{tmp_path}"', 'run="run"']),
        placement=SimpleNamespace(mode="cpu"),
        data=SimpleNamespace(evaluation=[1]),
        serving=SimpleNamespace(client=None, restarts=lambda: 0),
        connected=lambda: None,
        resume=False,
    )
    if stopped:
        it.interrupts.stop.set()
    tracker: Any = SimpleNamespace(held_out=SimpleNamespace(enough=False), finish=lambda **_: None)
    it._run(tracker, SimpleNamespace(model=None))
    assert (evaluated, enough) == ([] if stopped else ["eval_before"], [stopped])
