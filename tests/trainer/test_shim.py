"""What the shim rests on: each test fails when TRL changes it, and the last when the shim is no longer needed."""

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from bridge.errors import SyncMismatch
from trainer.hf_server import HFServer
from trainer_env.proof.agreement import Agreement
from trainer_env.training import trl_shim
from trainer_env.training.step_report import StepReport


def shifted(ids, logprobs, reason):
    return ids, [value + 0.5 for value in logprobs], reason


def test_a_trainer_that_ignores_rollout_func_is_found_out_at_once():
    class Ignores:
        def _generate_and_score_completions(self, inputs):
            return {"completion_ids": torch.zeros(1, 1)}

    trainer = trl_shim.using_sampling_logprobs(Ignores)()
    trainer.use_rollouts(SimpleNamespace(calls=0), Agreement(), lambda: None, contextlib.nullcontext)
    with pytest.raises(SyncMismatch, match="without calling rollout_func"):
        trainer._generate_and_score_completions([])


def test_a_trainer_that_drops_sampling_logprobs_is_found_out_at_once():
    class Drops:
        args = SimpleNamespace(vllm_importance_sampling_correction=True)

    trainer = trl_shim.using_sampling_logprobs(Drops)()
    with pytest.raises(SyncMismatch, match="dropped the logprobs"):
        trainer.compute_loss(None, {"completion_ids": torch.zeros(1, 1)})


def test_a_step_without_a_rollout_is_an_error():
    nothing: Any = SimpleNamespace(calls=0, global_step=1)
    report = StepReport(
        model=nothing,
        rollouts=nothing,
        publisher=nothing,
        prover=nothing,
        agreement=Agreement(),
        scoring=nothing,
        tracker=nothing,
    )
    with pytest.raises(SyncMismatch, match="without calling rollout_func"):
        report.on_step_end(None, nothing, nothing)


def test_trl_ignores_sampling_logprobs_without_the_shim(train, tiny, monkeypatch):
    """When this fails, TRL uses a rollout_func's logprobs by itself: remove the switches of training/trl_shim.py."""

    class Plain(GRPOTrainer):
        untempered_logprobs = trl_shim._UsesSamplingLogprobs.untempered_logprobs

        def use_rollouts(self, rollouts, agreement, publish, untempered):
            self._untempered = untempered

    monkeypatch.setattr(trl_shim, "using_sampling_logprobs", lambda trainer_class: Plain)
    plain = train("grpo.max_steps=1", run="plain")
    moved = train("grpo.max_steps=1", server=HFServer(tiny, edit=shifted), run="moved")
    assert moved.steps[0].grad_norm == pytest.approx(plain.steps[0].grad_norm, rel=1e-5)
    assert moved.steps[0].grad_norm != pytest.approx(plain.steps[0].grad_norm * math.exp(-0.5), rel=1e-2)
