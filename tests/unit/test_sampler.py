"""What the server is asked for: all of it is waited for, or nothing."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.protocol import Completion, Generate, Generated, pack_ids, pack_logprobs
from trainer_env.config import load
from trainer_env.sampling.sampler import Asked, Sampler

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


class Interrupted:
    """A server that nobody hears from; the third request to it is interrupted."""

    welcome = SimpleNamespace(log_path="", restart_s=0.0)

    def __init__(self) -> None:
        self.open: list[Future] = []

    def submit(self, _request):
        if len(self.open) == 2:
            raise KeyboardInterrupt
        self.open.append(Future())
        return self.open[-1]


def test_requests_whose_asking_is_interrupted_are_taken_back():
    server = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Asked(server, [Generate(prompt=b"")] * 3)  # type: ignore[arg-type]
    assert [future.cancelled() for future in server.open] == [True, True]


class Unnoted(Future):
    """Comes when somebody looks for it, and whoever waits hears of it long before those that are called back."""

    def done(self):
        done = super().done()
        if not done:
            self.set_result("found")
        return done

    def add_done_callback(self, fn):
        pass


def test_an_answer_that_was_waited_for_has_come_when_the_waiting_ends():
    server = SimpleNamespace(welcome=SimpleNamespace(log_path="", restart_s=0.0), submit=lambda _: Unnoted())
    asked = Asked(server, [Generate(prompt=b"")])  # type: ignore[arg-type]
    assert asked.answers() == ["found"]
    assert asked.answered_at > asked.asked_at


class Answering:
    """Answers everything at once, and keeps what it was asked."""

    welcome = SimpleNamespace(log_path="", restart_s=0.0, limits=SimpleNamespace(max_context=4096))

    def __init__(self) -> None:
        self.asked: list[Generate] = []

    def submit(self, request):
        self.asked.append(request)
        completion = Completion(pack_ids([2]), pack_logprobs([-0.1]), "stop")
        future: Future = Future()
        future.set_result(Generated(version=0, completions=(completion,) * request.n))
        return future


class Tokenizer:
    eos_token_id = 2
    chat_template = "{{ messages }}"

    def __call__(self, text, **_):
        return {"input_ids": [1] * len(text)}


@pytest.mark.parametrize(("prompts", "n", "batches"), [(1, 1, 1), (8, 1, 1), (9, 1, 2), (1000, 1, 125), (3, 4, 2)])
def test_a_large_evaluation_has_the_time_of_all_the_generation_batches_that_it_would_fill(prompts, n, batches):
    config = load(
        DEMO,
        [
            "grpo.per_device_train_batch_size=4",
            "grpo.gradient_accumulation_steps=2",
            "grpo.num_generations=4",
            "rollout.timeout_s=30",
            "data.chat=false",
            'data.system_prompt=""',
        ],
    )
    server = Answering()
    sampler = Sampler(server, Tokenizer(), config)  # type: ignore[arg-type]
    assert len(sampler.sample(["ab"] * prompts, n=n, temperature=1.0)) == prompts
    assert {request.deadline_s for request in server.asked} == {30 * batches}
