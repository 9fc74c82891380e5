"""Batches that are sampled ahead: in the run's order, each once, within the bound, and never for nothing."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bridge.errors import SyncMismatch
from bridge.protocol import Completion, Generate, Generated, Limits, pack_ids, pack_logprobs, unpack_ids
from trainer.hf_server import HFServer
from trainer.running import EXAMPLES
from trainer_env import ranks
from trainer_env.data import Example
from trainer_env.data.ordering import Schedule
from trainer_env.sampling import rollouts as rollouts_module
from trainer_env.sampling import sampler
from trainer_env.sampling.rollouts import Batch, Rollouts
from trainer_env.sampling.sampler import Sampler

EOS = 2
TEXTS = [f"number {index}" for index in range(7)]


class Server:
    """Answers when it is told to, under the version that was the newest when it was asked."""

    def __init__(self):
        limits = Limits(max_context=512, max_lora_rank=8, adapter_slots=2, max_in_flight=8)
        self.welcome: Any = SimpleNamespace(limits=limits, log_path="/log", restart_s=0.0)
        self.version = 0
        self.requests: list[Generate] = []
        self.futures: list[Future[Any]] = []
        self.prompt = True
        self._held: list[Any] = []

    def ask(self, request: Any, buffer: Any = None) -> Any:
        raise AssertionError("sampling does not wait")

    def submit(self, request: Any, buffer: Any = None) -> Future[Any]:
        one = Completion(pack_ids([7, EOS]), pack_logprobs([-0.5, -0.5]), "stop")
        future: Future[Any] = Future()
        self.requests.append(request)
        self.futures.append(future)
        self._held.append((future, Generated(version=self.version, completions=(one,) * request.n)))
        if self.prompt:
            self.answer()
        return future

    def answer(self):
        held, self._held = self._held, []
        for future, reply in held:
            if future.set_running_or_notify_cancel():
                future.set_result(reply)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def make(tokenizer, make_config):
    """Two groups of four a batch, in the order of TEXTS."""

    def make(server, *overrides, rank=0, ranks=1):
        config = make_config("grpo.max_steps=5", "grpo.shuffle_dataset=false", "rollout.timeout_s=9", *overrides)
        schedule = Schedule(config, [Example(text) for text in TEXTS], rank=rank, ranks=ranks)
        bound = config.max_staleness("cpu")
        return Rollouts(Sampler(server, tokenizer, config), config, schedule, max_staleness=bound)

    return make


def texts_of(tokenizer, requests):
    return [tokenizer.decode(unpack_ids(request.prompt)) for request in requests]


def call(rollouts, server, step, batch=None):
    """One optimizer step's rollout, with the version that the step before has published."""
    server.version = step
    before = len(server.requests)
    prompts = rollouts.schedule.prompts(rollouts.schedule.batch_at(step) if batch is None else batch)
    result = rollouts(prompts, SimpleNamespace(state=SimpleNamespace(global_step=step)))
    return result, server.requests[before:]


def test_without_staleness_a_batch_is_asked_for_when_it_is_wanted(make, tokenizer):
    server = Server()
    rollouts = make(server)
    for step in range(3):
        _, requests = call(rollouts, server, step)
        assert texts_of(tokenizer, requests) == TEXTS[2 * step : 2 * step + 2]
        assert rollouts.batches[-1].versions == [step] * 8


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_batches_are_asked_for_as_soon_as_a_version_serves_and_each_once(make, tokenizer, depth):
    server = Server()
    rollouts = make(server, f"rollout.max_staleness={depth}")
    new = [texts_of(tokenizer, call(rollouts, server, step)[1]) for step in range(5)]
    order = [TEXTS[index % 7] for index in range(10)]
    assert new[0] == order[: 2 * (depth + 1)]
    assert [text for texts in new for text in texts] == order  # As many as there are steps, and none beyond.
    assert [batch.versions[0] for batch in rollouts.batches] == [max(0, step - depth) for step in range(5)]


@pytest.mark.parametrize(
    ("overrides", "bound", "lag"),
    [
        (["grpo.steps_per_generation=2"], 3, 2),
        (["grpo.num_iterations=2"], 3, 2),
        (["grpo.steps_per_generation=2", "grpo.gradient_accumulation_steps=2"], 1, 1),
        (["grpo.steps_per_generation=1", "grpo.gradient_accumulation_steps=2"], 1, None),
    ],
)
def test_the_last_step_on_a_batch_is_within_the_bound(make, overrides, bound, lag):
    server = Server()
    rollouts = make(server, *overrides, f"rollout.max_staleness={bound}", "grpo.max_steps=8")
    schedule = rollouts.schedule
    for batch in range(schedule.batches):
        step = batch if lag == 1 else schedule.last_step(batch) if lag is None else batch * lag
        call(rollouts, server, step, batch)
        oldest = min(rollouts.batches[-1].versions)
        assert schedule.last_step(batch) - oldest <= bound
        if lag and batch > 1:
            assert step - oldest == lag


def test_a_resumed_run_begins_where_it_is_and_keeps_the_bound(make, tokenizer):
    server = Server()
    rollouts = make(server, "rollout.max_staleness=1")
    _, requests = call(rollouts, server, 3)
    assert texts_of(tokenizer, requests) == [TEXTS[6], TEXTS[0], TEXTS[1], TEXTS[2]]
    assert [request.min_version for request in requests] == [2, 2, 3, 3]
    assert call(rollouts, server, 4)[1] == []


def test_other_prompts_than_were_sampled_end_the_run_and_what_is_being_sampled(make):
    server = Server()
    rollouts = make(server, "rollout.max_staleness=2")
    call(rollouts, server, 0)
    server.prompt = False
    with pytest.raises(SyncMismatch, match="other prompts in optimizer step 2"):
        call(rollouts, server, 1, batch=3)
    assert all(future.done() for future in server.futures)


def test_what_nobody_will_train_on_is_given_up(make):
    server = Server()
    rollouts = make(server, "rollout.max_staleness=2")
    call(rollouts, server, 0)
    server.prompt = False
    call(rollouts, server, 1)
    open_ones = [future for future in server.futures if not future.done()]
    assert len(open_ones) == 2
    rollouts.give_up()
    assert all(future.cancelled() for future in open_ones)


def test_a_batch_that_waits_for_others_has_their_time_too(make):
    server = Server()
    _, requests = call(make(server, "rollout.max_staleness=2"), server, 0)
    assert [request.deadline_s for request in requests] == [9, 9, 18, 18, 27, 27]


def test_what_was_sampled_while_the_trainer_trained_costs_no_waiting(make, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(sampler, "time", clock)
    monkeypatch.setattr(rollouts_module, "time", clock)
    server = Server()
    rollouts = make(server, "rollout.max_staleness=1")
    call(rollouts, server, 0)
    server.prompt = False
    call(rollouts, server, 1)  # Asks for the third batch; the second is here.
    clock.now += 3
    server.answer()
    call(rollouts, server, 2)
    batch = rollouts.batches[-1]
    assert (batch.sampling_s, batch.seconds) == (3, 0)


def test_each_rank_looks_ahead_in_its_own_part(make, tokenizer):
    seen = []
    for rank in range(2):
        server = Server()
        rollouts = make(server, "rollout.max_staleness=1", rank=rank, ranks=2)
        seen.append([texts_of(tokenizer, call(rollouts, server, step)[1]) for step in range(2)])
    order = [TEXTS[index % 7] for index in range(12)]
    assert seen[0] == [[*order[0:2], *order[4:6]], order[8:10]]
    assert seen[1] == [[*order[2:4], *order[6:8]], order[10:12]]


# ---- in the real trainer ---------------------------------------------------------------------------------------------


def prompts_of(server: HFServer) -> list[bytes]:
    return [request.prompt for request in server.requests]


def test_a_run_with_staleness_trains_on_the_same_prompts_one_version_later(train):
    exact = train("grpo.max_steps=5", run="exact")
    ahead = train("grpo.max_steps=5", "rollout.max_staleness=1", run="ahead")
    assert prompts_of(ahead.server) == prompts_of(exact.server)
    assert [step.staleness for step in exact.steps] == [0, 0, 0, 0, 0]
    assert [step.staleness for step in ahead.steps] == [0, 1, 1, 1, 1]
    assert [step.overlap for step in exact.steps] == [None] * 5
    assert all(step.overlap is not None for step in ahead.steps)
    assert exact.steps[0].reward_mean == ahead.steps[0].reward_mean
    assert {step.proof for step in ahead.steps} <= {"agrees", "inconclusive"}


def test_tokens_a_second_are_those_of_the_server_and_not_of_the_waiting(train, monkeypatch):
    def batch(*, sampling_s, **figures):
        return Batch(sampling_s=2.0 if sampling_s > 0 else sampling_s, **figures)

    monkeypatch.setattr(rollouts_module, "Batch", batch)
    monkeypatch.setattr(ranks, "total", lambda value: 3 * value)
    monkeypatch.setattr(ranks, "most", lambda value: value + 1)
    ran = train("grpo.max_steps=3", "rollout.max_staleness=1")
    for step in ran.steps:
        assert step.generated_tokens == 3 * 8 * step.completion_length
        assert step.generated_tokens_per_s == pytest.approx(step.generated_tokens / 3.0)


def test_a_run_with_staleness_is_resumed_within_its_bound_and_with_the_same_prompts(train):
    whole = train("grpo.max_steps=6", "rollout.max_staleness=1", run="whole")
    how = ("grpo.save_steps=2", "rollout.max_staleness=1")
    train("grpo.max_steps=4", *how, run="parted")
    parted = train("grpo.max_steps=6", *how, run="parted", resume=True)
    assert prompts_of(parted.server) == prompts_of(whole.server)[-4:]
    assert [step.staleness for step in parted.steps[-2:]] == [0, 1]
    assert all(version in (4, 5) for version in [reply.version for reply in parted.server.replies])


def test_reused_batches_and_look_ahead_together_stay_within_the_bound(train):
    ran = train("grpo.max_steps=6", "grpo.num_iterations=2", "rollout.max_staleness=3", examples=EXAMPLES[:3])
    assert [step.staleness for step in ran.steps] == [0, 1, 2, 3, 2, 3]
