"""Whole runs on real GPUs: both halves at once, in turns, and apart."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from served import ROOT, VENVS, environment_python
from server_env.gpus.gpu_memory import used_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GIB = 2**30
BRIEF = {"server.cuda_graphs": "false", "evaluation.before": "false", "evaluation.after": "false"}
MODEL = os.environ.get("TANDEM_TEST_MODEL", "builtin:smollm2-135m-instruct")


@pytest.fixture(params=["vllm", "sglang"])
def train(request, tmp_path, engine_settings):
    """tandem-train on the default job; its metrics, summary and output. brief: without what makes a start long."""
    environment_python("trainer")
    environment_python(f"server-{request.param}")

    def train(*words: str, brief: bool = True) -> tuple[list[dict], dict, str]:
        settings = {
            "output_dir": str(tmp_path),
            "model.name": MODEL,
            **(BRIEF if brief else {}),
            **{
                f"{request.param}.{key}": json.dumps(value)
                for key, value in engine_settings.get(request.param, {}).items()
            },
        }
        command = [str(VENVS / "trainer" / "bin" / "tandem-train"), "--backend", request.param, "--run", "run", *words]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        run = Path(tmp_path) / "run"
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return metrics, json.loads((run / "summary.json").read_text()), done.stdout

    return train


@pytest.mark.gpu
def test_the_default_job_learns_in_turns_with_a_server_that_sleeps_while_the_trainer_trains(train):
    before = used_bytes()
    metrics, summary, _ = train("--placement", "time-share", brief=False)
    assert summary["placement"] == "time-share"
    assert [step["version"] for step in metrics] == list(range(1, 37))
    assert summary["reward_last4"] > summary["reward_first4"] + 0.3
    for step in metrics:
        assert step["freed_bytes"] > 10 * GIB
        assert step["sleep_s"] > 0
        assert step["wake_s"] > 0
        assert step["staleness"] == 0
        assert step["proof"] in ("agrees", "inconclusive")
    assert used_bytes() < before + GIB // 4


@pytest.mark.gpu
def test_one_gpu_that_holds_both_is_shared(train):
    metrics, summary, said = train("--steps", "4", "--set", "rollout.max_staleness=1", "--set", 'placement.mode="auto"')
    if "split" in said:
        pytest.skip("there is more than one GPU")
    assert summary["placement"] == "shared"
    assert [step["staleness"] for step in metrics] == [0, 1, 1, 1]
    assert all(step["sleep_s"] is None for step in metrics)


@pytest.mark.gpu(count=2)
def test_two_gpus_are_shared_out_and_the_server_samples_ahead(train):
    metrics, summary, said = train("--placement", "split", "--steps", "6")
    assert summary["placement"] == "split"
    assert "server   GPU 0" in said
    assert "trainer  GPU 1" in said
    assert [step["staleness"] for step in metrics] == [0, 1, 1, 1, 1, 1]
    assert any(step["overlap"] > 0 for step in metrics)
