"""Trackers: what is missing is said before anything starts, and what each one is told of a run."""

import os
from pathlib import Path

import msgspec
import pytest

from bridge.errors import ConfigError
from trainer_env import config
from trainer_env.extra_packages import install_command
from trainer_env.placement import Placement
from trainer_env.runs.records import Evaluation, StepMetrics
from trainer_env.runs.report_to import evaluation_figures, filled_in, require_packages, step_figures, variables
from trainer_env.session import Session

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    require_packages([])
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    require_packages(["wandb"])
    with pytest.raises(ConfigError, match="'comet_ml'") as refused:
        require_packages(["wandb", "comet_ml"])
    assert "'wandb'" not in refused.value.what
    assert refused.value.remedy.startswith(f"{install_command('comet-ml')}; again after scripts/setup_envs.sh ")


def test_a_session_refuses_before_it_reads_or_starts_anything(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = config.load(DEMO, ['tracking.report_to=["mlflow"]', "run=x", "data.source=none.jsonl"])
    with pytest.raises(ConfigError, match=r"tracking\.report_to: .*'mlflow' needs: mlflow"):
        Session(settings, Placement(mode="cpu"))
    assert list(tmp_path.iterdir()) == []


def test_variables_are_the_runs_for_as_long_as_they_are_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    one = variables(config.load(DEMO, ["run=one"]))
    with filled_in(one):
        assert os.environ["WANDB_PROJECT"] == "mine"
        assert os.environ["WANDB_DIR"] == str(tmp_path / "runs" / "one")
        assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "runs" / "one" / "tensorboard")
    assert "WANDB_DIR" not in os.environ
    assert os.environ["WANDB_PROJECT"] == "mine"
    with pytest.raises(RuntimeError), filled_in(one):
        raise RuntimeError
    assert "WANDB_DIR" not in os.environ


def test_figures_are_numbers_and_those_of_trl_are_not_told_twice():
    metrics = StepMetrics(step=3, version=3, reward_mean=0.5, ratio_mean=1.01, proof="agrees", sleep_s=None)
    assert step_figures(metrics) == {"tandem/version": 3, "tandem/ratio_mean": 1.01}
    told = step_figures(StepMetrics(step=1, version=1, publish_ms=1, rollout_s=2, staleness=0, proof_ms=3))
    assert set(told) == {f"tandem/{name}" for name in ("version", "publish_ms", "rollout_s", "staleness", "proof_ms")}


def test_an_evaluation_tells_its_reward_and_pass_at_k():
    record = Evaluation(phase="eval", step=4, reward_mean=0.5, examples=8, seconds=2.0)
    assert evaluation_figures(record) == {"eval_reward": 0.5, "eval_seconds": 2.0}
    record = msgspec.structs.replace(record, pass_at={"1": 0.5, "4": 0.75})
    assert evaluation_figures(record)["eval_pass@4"] == 0.75
