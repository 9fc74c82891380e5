"""The real trainer on a tiny model: what it learns from, what it publishes, what it reports."""

import math
import threading
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from bridge.errors import ConfigError
from bridge.protocol import unpack_ids, unpack_logprobs
from trainer.hf_server import HFServer
from trainer.running import LOW_TOKENS
from trainer_env.data import Example
from trainer_env.proof.prover import SyncWarning
from trainer_env.rewards import Reward
from trainer_env.rewards.reward_errors import RewardError
from trainer_env.runs.checkpoints import last_checkpoint
from trainer_env.runs.tracking import Tracker
from trainer_env.training import grpo

WARN = 'rollout.on_sync_mismatch="warn"'


def shifted(by):
    """Logprobs as a server would report them that computes another policy."""
    return lambda ids, logprobs, reason: (ids, [value + by for value in logprobs], reason)


def test_a_run_from_start_to_end(train, tiny, tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    done = train("grpo.max_steps=3")

    assert [step.step for step in done.steps] == [1, 2, 3]
    assert [step.version for step in done.steps] == [1, 2, 3]
    assert list(done.server.adapters) == [1, 2, 3]
    assert [request.min_version for request in done.server.requests] == [0, 0, 1, 1, 2, 2]
    assert [reply.version for reply in done.server.replies] == [0, 0, 1, 1, 2, 2]
    for step in done.steps:
        assert step.staleness == 0
        assert step.ratio_mean == pytest.approx(1, abs=1e-4)
        assert step.dlogp_mean_abs < 1e-4
        assert step.generated_tokens == step.completion_length * 8
        assert step.generated_tokens_per_s >= step.generated_tokens / step.rollout_s
        assert step.load_ms == 1.0
        assert step.grad_norm > 0
        figures = (step.reward_mean, step.reward_std, step.loss, step.rollout_s, step.train_s, step.publish_ms)
        assert all(math.isfinite(figure) for figure in figures)
    assert [step.learning_rate for step in done.steps] == pytest.approx([3e-4, 2e-4, 1e-4])

    assert len(done.samples) == 24
    sample = done.samples[0]
    assert sample.version == 0
    assert sample.reward == sample.rewards["low"]
    assert sample.answer is not None
    assert sample.prompt.startswith("What is")
    by_step = [[sample.reward for sample in done.samples if sample.step == step] for step in (1, 2, 3)]
    assert [sum(rewards) / 8 for rewards in by_step] == pytest.approx([step.reward_mean for step in done.steps])

    assert done.outcome == grpo.Outcome(step=3, adapter=done.config.run_dir / "adapter", finished=True)
    saved = load_file(done.outcome.adapter / "adapter_model.safetensors")
    served = load(done.server.adapters[3])
    assert saved.keys() == served.keys()
    assert all(torch.equal(saved[name], served[name]) for name in saved)
    ids = torch.arange(5, 25).unsqueeze(0)
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), done.outcome.adapter).eval()
    torch.testing.assert_close(reloaded(ids).logits, done.policy.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)

    assert list(Path.cwd().iterdir()) == []


def test_rewards_that_never_differ_are_told_of(train, monkeypatch):
    said = []
    monkeypatch.setattr(Tracker, "note", lambda _, text: said.append(text))
    train("grpo.max_steps=10", rewards=[Reward("same", lambda *, completions, **_: [-0.01] * len(completions))])
    (line,) = said
    assert "taught nothing" in line
    assert "(mean now -0.01)" in line
    said.clear()
    train("grpo.max_steps=10", run="learns")
    assert not said


def test_a_step_makes_what_was_rewarded_likelier(train):
    done = train("grpo.max_steps=1", "grpo.learning_rate=1e-3")
    done.server.load(1)
    gain = 0.0
    for request, reply in zip(done.server.requests, done.server.replies, strict=True):
        groups = [unpack_ids(completion.token_ids) for completion in reply.completions]
        rewards = LOW_TOKENS([], groups, completion_ids=groups)
        for ids, completion, reward in zip(groups, reply.completions, rewards, strict=True):
            after = sum(done.server.score(unpack_ids(request.prompt), ids))
            gain += (reward - sum(rewards) / len(rewards)) * (after - sum(unpack_logprobs(completion.logprobs)))
    assert gain > 0.01


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_the_first_ratio_is_1_at_any_temperature(train, temperature):
    done = train(f"grpo.temperature={temperature}", "grpo.max_steps=1")
    assert done.steps[0].ratio_mean == pytest.approx(1, abs=1e-3)


def test_a_server_that_reports_other_logprobs_shows_in_the_ratio_and_is_warned_of(train, tiny, monkeypatch):
    noted = []
    monkeypatch.setattr(Tracker, "note", lambda _, text: noted.append(text))
    with pytest.warns(SyncWarning, match=r"importance ratio of an on-policy batch is 0\.905"):
        done = train(WARN, server=HFServer(tiny, edit=shifted(0.1)))
    assert any("do not compute the same policy" in text for text in noted)  # It stays, whatever the next step says.
    assert [step.proof for step in done.steps] == ["disagrees"] * 2
    assert [step.ratio_mean for step in done.steps] == pytest.approx([math.exp(-0.1)] * 2, abs=1e-3)
    assert [step.dlogp_mean_abs for step in done.steps] == pytest.approx([0.1] * 2, abs=1e-3)


def test_sampling_logprobs_weigh_each_token_in_the_gradient(train, tiny):
    plain = train("grpo.max_steps=1")
    with pytest.warns(SyncWarning):
        less = train(WARN, "grpo.max_steps=1", server=HFServer(tiny, edit=shifted(0.1)), run="less")
    assert less.steps[0].grad_norm / plain.steps[0].grad_norm == pytest.approx(math.exp(-0.1), rel=1e-3)
    # A weight is truncated at clip_max (3), but the ratio is reported as it is.
    with pytest.warns(SyncWarning):
        more = train(WARN, "grpo.max_steps=1", server=HFServer(tiny, edit=shifted(-2.0)), run="more")
    assert more.steps[0].grad_norm / plain.steps[0].grad_norm == pytest.approx(3, rel=1e-3)
    assert more.steps[0].ratio_mean == pytest.approx(math.exp(2), rel=1e-3)


def test_a_batch_in_reuse_ages_and_its_ratio_is_that_of_the_weights_before_each_step(train):
    done = train("grpo.max_steps=4", "grpo.num_iterations=2", "grpo.learning_rate=1e-3")
    assert [step.staleness for step in done.steps] == [0, 1, 0, 1]
    assert [request.min_version for request in done.server.requests] == [0, 0, 2, 2]
    assert [step.generated_tokens > 0 for step in done.steps] == [True, False, True, False]
    assert done.steps[1].reward_mean == done.steps[0].reward_mean

    done.server.load(1)
    ratios = []
    for request, reply in zip(done.server.requests[:2], done.server.replies[:2], strict=True):
        for completion in reply.completions:
            trainer = done.server.score(unpack_ids(request.prompt), unpack_ids(completion.token_ids))
            server = unpack_logprobs(completion.logprobs)
            ratios += [math.exp(mine - theirs) for mine, theirs in zip(trainer, server, strict=True)]
    expected = sum(ratios) / len(ratios)
    assert abs(expected - 1) > 1e-4
    assert done.steps[1].ratio_mean == pytest.approx(expected, abs=2e-5)


def test_accumulated_micro_batches_are_one_rollout_and_one_publish(train):
    done = train("grpo.per_device_train_batch_size=4", "grpo.gradient_accumulation_steps=2")
    assert [request.n for request in done.server.requests] == [4] * 4
    assert list(done.server.adapters) == [1, 2]
    assert [step.ratio_mean for step in done.steps] == pytest.approx([1, 1], abs=1e-4)


def test_a_resumed_run_is_the_run_that_was_never_interrupted(train, tiny):
    settings = ("grpo.max_steps=5", "grpo.save_steps=2")
    whole = train(*settings, run="whole")

    def crash_at_step_4(*, completion_ids, trained=[], **_):  # noqa: B006 (counts its calls)
        trained.append(1)
        if len(trained) == 4:
            raise OSError("the machine lost power")
        return LOW_TOKENS([], completion_ids, completion_ids=completion_ids)

    with pytest.raises(RewardError, match="lost power"):
        train(*settings, rewards=[Reward("low", crash_at_step_4)], run="broken")
    server = HFServer(tiny)
    rest = train(*settings, run="broken", server=server, resume=True)

    # Served before the first rollout is asked for, and asked for as it was the first time.
    assert list(server.adapters) == [2, 3, 4, 5]
    assert server.replies[0].version == 2
    assert [request.prompt for request in server.requests] == [
        request.prompt for request in whole.server.requests[2 * 2 :]
    ]
    assert all(server.adapters[version] == whole.server.adapters[version] for version in (3, 4, 5))
    again, first = rest.steps[-3:], whole.steps[-3:]
    assert [step.step for step in again] == [3, 4, 5]
    for name in ("reward_mean", "loss", "learning_rate", "grad_norm", "ratio_mean", "staleness"):
        assert [getattr(step, name) for step in again] == [getattr(step, name) for step in first], name


def test_a_run_can_be_made_longer(train, tiny):
    train("grpo.max_steps=1", 'grpo.lr_scheduler_type="constant"')
    more = train("grpo.max_steps=3", 'grpo.lr_scheduler_type="constant"', resume=True, server=HFServer(tiny))
    assert more.outcome.step == 3
    assert list(more.server.adapters) == [1, 2, 3]


def test_there_must_be_something_to_resume(train):
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        train(resume=True)


def test_a_run_that_is_told_to_stop_ends_with_a_checkpoint_and_an_adapter(train):
    stop = threading.Event()
    done = train("grpo.max_steps=50", stop=stop, after_step=lambda step: stop.set())
    assert not done.outcome.finished
    assert done.outcome.step == 1
    assert last_checkpoint(done.config.run_dir / "checkpoints") == done.config.run_dir / "checkpoints" / "checkpoint-1"
    assert (done.outcome.adapter / "adapter_model.safetensors").exists()


def test_what_happens_after_a_step_finds_its_version_serving(train, tiny):
    server, seen = HFServer(tiny), []
    train(server=server, after_step=lambda step: seen.append((step, server.version)))
    assert seen == [(1, 1), (2, 2)]


def test_empty_completions_are_trained_around(train, tiny):
    calls = []

    def every_other_empty(ids, logprobs, reason):
        calls.append(ids)
        return ([], [], "stop") if len(calls) % 2 else (ids, logprobs, reason)

    done = train(server=HFServer(tiny, edit=every_other_empty))
    assert [step.ratio_mean for step in done.steps] == pytest.approx([1, 1], abs=1e-4)
    assert all(step.grad_norm > 0 for step in done.steps)


def test_a_batch_of_empty_completions_moves_nothing_and_is_no_error(train, tiny):
    done = train(server=HFServer(tiny, edit=lambda *_: ([], [], "stop")))
    assert [step.ratio_mean for step in done.steps] == [None, None]
    assert [step.grad_norm for step in done.steps] == [0, 0]
    assert done.server.adapters[1] == done.server.adapters[2]


def test_text_prompts_and_columns_reach_the_rewards_as_they_are(train):
    examples = [
        Example(f"{x} + {x} =", answer=str(2 * x), columns={"hint": {"a": x} if x % 2 else None}) for x in (1, 2)
    ]
    seen = []

    def reward(*, prompts, completions, completion_ids, answer, hint, finish_reason, **rest):
        seen.append((prompts, completions, answer, hint, finish_reason, sorted(rest)))
        return LOW_TOKENS(prompts, completions, completion_ids=completion_ids)

    train("grpo.max_steps=1", examples=examples, rewards=[Reward("one", reward, 0.5), Reward("two", reward, 2.0)])
    prompts, completions, answers, hints, reasons, rest = seen[0]
    assert len(seen) == 2
    assert set(prompts) == {"1 + 1 =", "2 + 2 ="}
    assert all(isinstance(text, str) for text in completions)
    assert all(
        text == f"{int(answer) // 2} + {int(answer) // 2} =" for text, answer in zip(prompts, answers, strict=True)
    )
    assert all(hint == ({"a": 1} if answer == "2" else None) for hint, answer in zip(hints, answers, strict=True))
    assert set(reasons) <= {"stop", "length"}
    assert rest == []


def test_with_a_reference_policy_only_the_trained_adapter_is_published(train):
    done = train("grpo.beta=0.05")
    assert "ref" in done.policy.model.peft_config
    assert all("ref" not in name for name in load(done.server.adapters[2]))
    assert not (done.outcome.adapter / "ref").exists()


@pytest.mark.parametrize(
    "settings",
    [
        ['grpo.loss_type="grpo"', 'grpo.importance_sampling_level="sequence"'],
        ['grpo.loss_type="dr_grpo"', 'grpo.scale_rewards="none"'],
        ['grpo.loss_type="cispo"', "grpo.epsilon_high=5.0"],
        ["grpo.mask_truncated_completions=true"],
    ],
    ids=lambda settings: settings[0],
)
def test_other_ways_to_learn_run_and_agree(train, settings):
    done = train(*settings)
    assert [step.ratio_mean or 1 for step in done.steps] == pytest.approx([1, 1], abs=1e-4)


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another(make_config, tiny):
    def first_a(seed):
        model = grpo.load_policy(make_config(f"seed={seed}"), tiny).model
        return next(parameter for name, parameter in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first_a(3), first_a(3))
    assert not torch.equal(first_a(3), first_a(4))


def test_a_layer_that_the_model_lacks_is_refused_while_it_is_loaded(make_config, tiny):
    with pytest.raises(ConfigError, match=r"has no layer 'q_prj'\.") as refused:
        grpo.load_policy(make_config("lora.target_modules=['q_proj','q_prj']"), tiny)
    assert "'q_proj'" in refused.value.remedy


def test_padding_is_told_from_every_token_of_a_prompt(make_config, tiny):
    tokenizer = grpo.load_policy(make_config(), tiny).tokenizer
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.eos_token_id in prompt
    assert tokenizer.pad_token_id not in prompt
