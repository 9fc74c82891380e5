import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_env.training import grpo


@pytest.mark.parametrize("packed", ["0", "1"])
def test_unsloths_own_trainer_uses_and_measures_sampling_logprobs(tmp_path, packed):
    """It keeps logprobs in another layout than TRL's, with a row's padding moved to its end or left out."""
    here = Path(__file__).parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(here.parent), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "UNSLOTH_GRPO_SEQ_PACKING": packed,
    }
    done = subprocess.run(
        [sys.executable, here / "patched_run.py", tmp_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout.splitlines()[-1])

    assert runs["trainer"] == "UnslothGRPOTrainer"
    plain, shifted, reused = runs["plain"], runs["shifted"], runs["reused"]
    # Both halves compute in float32: it does not autocast.
    assert [step["proof"] for step in plain] == ["agrees", "agrees"]
    assert [step["proof"] for step in shifted] == ["disagrees", "disagrees"]
    assert [step["ratio_mean"] for step in plain] == pytest.approx([1, 1], abs=0.01)
    assert all(step["dlogp_mean_abs"] < 1e-5 for step in plain)
    assert [step["ratio_mean"] for step in shifted] == pytest.approx([math.exp(-0.5)] * 2, abs=0.01)
    assert shifted[0]["grad_norm"] / plain[0]["grad_norm"] == pytest.approx(math.exp(-0.5), rel=0.01)
    assert [step["staleness"] for step in reused] == [0, 1]
    assert reused[0]["ratio_mean"] == pytest.approx(1, abs=0.01)
    assert reused[1]["dlogp_mean_abs"] > 10 * reused[0]["dlogp_mean_abs"]
    assert not (tmp_path / "unsloth_compiled_cache").exists()


@pytest.mark.parametrize(
    ("torch", "installed", "packed"),
    [
        ("2.11.0", (), False),
        ("2.11.0+cu130", ("xformers",), True),
        ("2.11.0", ("flash_attn",), True),
        ("2.12.0", (), True),
        ("3.0.1+cpu", (), True),
    ],
)
def test_rows_are_packed_where_a_kernel_attends_to_them(monkeypatch, torch, installed, packed):
    monkeypatch.setattr("importlib.metadata.version", {"torch": torch}.__getitem__)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    assert grpo.attends_to_packed_rows() == packed
