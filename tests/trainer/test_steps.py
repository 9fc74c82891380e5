"""The small pieces around a step: the order of prompts, the figures of agreement, checkpoints, settings."""

import dataclasses
import json
import math

import pytest
import torch
import trl

from bridge.errors import ConfigError
from trainer_env.config.trl_fields import grpo_fields
from trainer_env.data.ordering import order
from trainer_env.proof.agreement import Agreement
from trainer_env.runs.checkpoints import NEEDED, last_checkpoint, step_of
from trainer_env.training.trl_settings import trl_settings
from trainer_env.training.trl_shim import unpacked


def test_each_pass_has_every_example_once_in_an_order_of_its_own():
    passes = order(20, 60, seed=1, shuffle=True)
    first, second, third = passes[:20], passes[20:40], passes[40:]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(20))
    assert len({tuple(first), tuple(second), tuple(third), tuple(range(20))}) == 4
    assert order(20, 60, seed=2, shuffle=True) != passes


def test_a_longer_run_begins_like_a_shorter_one():
    assert order(20, 70, seed=1, shuffle=True)[:33] == order(20, 33, seed=1, shuffle=True)
    assert order(3, 7, seed=1, shuffle=False) == [0, 1, 2, 0, 1, 2, 0]


def test_agreement_in_golden_numbers():
    agreement = Agreement()
    server = torch.tensor([[-1.0, -2.0, 0.0], [-3.0, 0.0, 0.0]])
    trainer = server + torch.tensor([[math.log(2), math.log(0.5), 99.0], [0.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    agreement.add(trainer, server, mask, torch.tensor([4, 3]))
    figures = agreement.take()
    assert figures.ratio_mean == pytest.approx((2 + 0.5 + 1) / 3)
    assert figures.dlogp_mean_abs == pytest.approx(2 * math.log(2) / 3)
    assert figures.oldest_version == 3
    assert agreement.take().ratio_mean is None


def test_agreement_over_micro_batches_counts_tokens_not_batches():
    agreement = Agreement()
    zero, one = torch.zeros(1, 3), torch.tensor([5])
    agreement.add(zero + math.log(3), zero, torch.tensor([[1, 0, 0]]), one)
    agreement.add(zero, zero, torch.tensor([[1, 1, 1]]), one)
    assert agreement.take().ratio_mean == pytest.approx((3 + 1 + 1 + 1) / 4)


def test_rows_without_a_trained_token_have_no_ratio():
    agreement = Agreement()
    agreement.add(torch.zeros(1, 2), torch.full((1, 2), -torch.inf), torch.zeros(1, 2), torch.tensor([1]))
    figures = agreement.take()
    assert (figures.ratio_mean, figures.dlogp_mean_abs, figures.oldest_version) == (None, None, 1)


def test_logprobs_are_found_in_a_layout_that_moves_padding_to_the_right():
    # Two prompts of 4 and 2 tokens, completions of 3: the first row keeps its place, the second starts 2 earlier.
    prompt_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    packed = torch.tensor([[91.0, 92.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 93.0, 94.0]])
    assert unpacked(packed, prompt_mask, 3).tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    plain = torch.tensor([[1.0, 2.0, 3.0]])
    assert unpacked(plain, prompt_mask[:1], 3) is plain


def checkpoint(folder, step, without=(), state=None):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in set(NEEDED) - set(without):
        (path / name).write_text("")
    if "trainer_state.json" not in without:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}) if state is None else state)
    return path


def test_the_newest_whole_checkpoint_is_taken(tmp_path):
    assert last_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 9)
    newest = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, without=["trainer_state.json"])
    checkpoint(tmp_path, 12, without=["optimizer.pt"])
    checkpoint(tmp_path, 13, state='{"global_st')
    checkpoint(tmp_path, 14, state='{"global_step": 2}')
    (tmp_path / "checkpoint-last").mkdir()
    assert last_checkpoint(tmp_path) == newest
    assert step_of(newest) == 10


def test_extra_settings_reach_trl_and_cannot_undo_what_a_run_relies_on(make_config):
    def settings(extra, known=("delta", "logging_steps")):
        return trl_settings(make_config(extra), reward_weights=[1.0], on_gpu=False, known=known)

    assert settings("grpo.extra.delta=4.0")["delta"] == 4.0
    with pytest.raises(ConfigError, match=r"extra\.logging_steps: cannot be set"):
        settings("grpo.extra.logging_steps=5")
    with pytest.raises(ConfigError) as unknown:
        settings("grpo.extra.delta=4.0", known=["delt"])
    assert "'delt'" in unknown.value.remedy


def test_a_setting_that_trl_does_not_have_is_refused_with_the_rest_of_the_config(make_config):
    with pytest.raises(ConfigError, match=r"grpo\.extra\.detla: TRL's GRPOConfig has no such setting .*'delta'"):
        make_config("grpo.extra.detla=2.0")
    fields = dataclasses.fields(trl.GRPOConfig)
    assert grpo_fields() >= {field.name for field in fields if field.init and not field.name.startswith("unsloth_")}
