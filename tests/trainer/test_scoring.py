"""TRL's own way of calling rewards finds a batch's scores after its first call."""

import threading
from types import SimpleNamespace

import torch
from trl import GRPOTrainer

from trainer_env.rewards import Reward
from trainer_env.rewards.scoring import Scoring


def test_trl_runs_all_rewards_of_a_batch_at_once():
    barrier, calls = threading.Barrier(2), []

    def reward(name, pay):
        def function(*, completions, completion_ids, answer, **_):
            calls.append((name, completion_ids, answer))
            barrier.wait(30)
            return [pay] * len(completions)

        return Reward(name, function)

    scoring = Scoring([reward("a", 1.0), reward("b", 2.0)])
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=True),
        reward_funcs=scoring.functions(),
        reward_processing_classes=[None, None],
        reward_func_names=["a", "b"],
        environments=None,
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=[]),
        _log_completion_extra=None,
        _log_metric=None,
    )
    for step in ("1", "2"):
        inputs = [{"prompt": "p", "answer": step}, {"prompt": "q", "answer": step}]
        found = GRPOTrainer._calculate_rewards(trainer, inputs, ["p", "q"], ["x", "y"], [[1], [2]])
        assert torch.equal(found, torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    assert sorted(calls) == [(name, [[1], [2]], [step] * 2) for name in "ab" for step in "12"]
