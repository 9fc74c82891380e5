"""Trackers: what is missing is said before anything starts, and what each one is told of a run."""

import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from bridge.errors import ConfigError
from trainer_env import config
from trainer_env.extra_packages import install_command
from trainer_env.placement import Placement
from trainer_env.runs.records import Evaluation, StepMetrics
from trainer_env.runs.report_to import (
    evaluation_figures,
    filled_in,
    require_packages,
    step_figures,
    variables,
    wandb_run,
)
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


def run_of(folder, run="adding"):
    settings = config.load(DEMO, [f"output_dir={folder}", f"run={run}"])
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    return settings


def test_a_run_that_goes_on_is_the_same_one_at_weights_and_biases(tmp_path):
    first = wandb_run(run_of(tmp_path), {})
    assert first["resume"] == "allow"
    assert re.fullmatch(r"adding-[0-9a-f]{12}", first["id"])
    assert wandb_run(run_of(tmp_path), {}) == first


def test_runs_of_one_name_and_copies_of_a_run_are_others(tmp_path):
    one, other = run_of(tmp_path / "one"), run_of(tmp_path / "other")
    ids = {wandb_run(one, {})["id"], wandb_run(other, {})["id"]}
    shutil.copytree(one.run_dir, tmp_path / "one" / "copy")
    ids.add(wandb_run(run_of(tmp_path / "one", "copy"), {})["id"])
    shutil.rmtree(one.run_dir)
    ids.add(wandb_run(run_of(tmp_path / "one"), {})["id"])
    assert len(ids) == 4


def test_an_id_of_a_long_name_is_no_longer_than_the_service_takes(tmp_path):
    assert len(wandb_run(run_of(tmp_path, "long" * 40), {})["id"]) <= 64


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({"WANDB_RUN_ID": "mine"}, {"resume"}),
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, set()),
        ({"WANDB_RESUME": "must"}, {"id"}),
        ({"WANDB_RESUME": "never"}, set()),
        ({"WANDB_RESUME": "auto"}, set()),
    ],
)
def test_what_a_user_says_of_the_run_at_weights_and_biases_wins(tmp_path, given, chosen):
    assert wandb_run(run_of(tmp_path), given).keys() == chosen


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
