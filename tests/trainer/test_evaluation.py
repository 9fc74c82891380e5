"""Evaluations in the middle of a real run: the best adapter is kept, and training ends when nothing gets better."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import TrainerControl

from bridge.protocol import Generate
from trainer.hf_server import HFServer
from trainer.running import EXAMPLES
from trainer_env import ranks
from trainer_env.evaluation import best_adapter
from trainer_env.proof.agreement import Agreement
from trainer_env.rewards import Reward
from trainer_env.runs.checkpoints import last_checkpoint
from trainer_env.runs.records import Best
from trainer_env.training.step_report import Enough, StepReport

EVERY_STEP = ("evaluation.every=1", "grpo.max_steps=6", "evaluation.temperature=1.0", "evaluation.num_generations=2")
PATIENT = (*EVERY_STEP, "evaluation.early_stopping_patience=2")


class Watched(HFServer):
    """Says which versions were asked for by number, and for how many answers."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.evaluated: list[tuple[int, int]] = []

    def submit(self, request, buffer=None):
        if isinstance(request, Generate) and request.version > 0 and not request.sampling.ignore_eos:
            self.evaluated.append((request.version, request.n))
        return super().submit(request, buffer)


def rewards(server, script):
    """Held out, a version is worth what the script says of it; in training a completion its share of low tokens."""

    def reward(*, completion_ids, prompts, **_):
        if len(prompts) == 4:  # Two examples, two answers each; a batch of training has eight.
            return [script[server.evaluated[-1][0]]] * 4
        return [sum(token < 24576 for token in ids) / len(ids) for ids in completion_ids]

    return [Reward("scripted", reward)]


@pytest.fixture
def evaluated(train, tiny):
    def run(script, *overrides, **how):
        server = Watched(tiny)
        return train(*overrides, server=server, rewards=rewards(server, script), held_out=EXAMPLES[:2], **how)

    return run


def kept(run):
    """Of which step the adapter in best/ is."""
    best = best_adapter.read(run.config.run_dir)
    assert best
    return best.step


def test_training_ends_after_the_step_whose_evaluation_was_one_too_many(evaluated):
    done = evaluated({1: 0.2, 2: 0.6, 3: 0.5, 4: 0.6, 5: 0.9, 6: 0.9}, *PATIENT)
    assert [step.step for step in done.steps] == [1, 2, 3, 4]
    assert done.outcome.step == 4
    assert list(done.server.adapters) == [1, 2, 3, 4]
    assert done.tracker.held_out.enough
    assert last_checkpoint(done.config.run_dir / "checkpoints") == done.config.run_dir / "checkpoints" / "checkpoint-4"
    assert [(record.step, record.reward_mean, record.num_generations) for record in done.tracker.evaluations] == [
        (1, 0.2, 2),
        (2, 0.6, 2),
        (3, 0.5, 2),
        (4, 0.6, 2),
    ]
    # Each was answered under the version of its step, and the adapter that is kept is the one that was measured.
    assert done.server.evaluated == [(version, 2) for version in (1, 2, 3, 4) for _ in range(2)]
    assert best_adapter.read(done.config.run_dir) == Best(step=2, version=2, reward_mean=0.6)
    kept = load_file(done.config.run_dir / "best" / "adapter_model.safetensors")
    served = load(done.server.adapters[2])
    assert kept.keys() == served.keys()
    assert all(torch.equal(kept[name], served[name]) for name in kept)
    assert not all(torch.equal(kept[name], tensor) for name, tensor in load(done.server.adapters[4]).items())


def test_a_run_that_had_ended_early_takes_no_further_step_and_serves_its_last_version(evaluated):
    script = {1: 0.6, 2: 0.5, 3: 0.5, 4: 0.7, 5: 0.7, 6: 0.7}
    first = evaluated(script, *PATIENT)
    assert first.outcome.step == 3
    again = evaluated(script, *PATIENT, resume=True)
    assert again.outcome.step == 3
    assert again.server.adapters == {3: first.server.adapters[3]}
    assert again.server.evaluated == []
    saved = [load_file(done.outcome.adapter / "adapter_model.safetensors") for done in (first, again)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])

    longer = evaluated(script, *PATIENT, "evaluation.early_stopping_patience=3", resume=True)
    assert [record.step for record in longer.tracker.evaluations] == [1, 2, 3, 4, 5, 6]
    assert longer.outcome.step == 6
    assert kept(longer) == 4


@pytest.mark.parametrize(("best", "again", "then"), [(3, 0.2, 3), (5, 0.2, 5), (5, 0.95, 6)])
def test_the_best_adapter_outlives_a_kill_until_a_better_one_is_measured(evaluated, best, again, then):
    settings = (*EVERY_STEP, "grpo.save_steps=2")
    done = evaluated({step: 0.9 if step == best else 0.5 for step in range(1, 7)}, *settings)
    assert kept(done) == best
    # As after a kill in step 6: the last checkpoint is of step 4, and step 5 turns out otherwise.
    shutil.rmtree(done.config.run_dir / "checkpoints" / "checkpoint-6")
    rest = evaluated({5: 0.1, 6: again}, *settings, resume=True)
    assert [record.step for record in rest.tracker.evaluations] == [1, 2, 3, 4, 5, 6]
    assert kept(rest) == then


def test_the_other_processes_end_when_the_first_one_has_had_enough(monkeypatch):
    nothing: Any = None
    rollouts: Any = SimpleNamespace(batches=[])
    report = StepReport(
        model=nothing,
        rollouts=rollouts,
        publisher=nothing,
        prover=nothing,
        agreement=Agreement(),
        scoring=nothing,
        tracker=None,
    )
    state: Any = SimpleNamespace(is_world_process_zero=False, global_step=3)
    for enough in (False, True):
        monkeypatch.setattr(ranks, "any_of", lambda mine, enough=enough: mine or enough)
        control = report.on_log(nothing, state, TrainerControl(), {"learning_rate": 0.1})
        assert (control.should_training_stop, control.should_save) == (enough, enough)
    with pytest.raises(Enough):
        report.on_train_begin(nothing, state)
