import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from bridge.errors import BridgeError, Busy, ConfigError, EngineFailed, StaleVersion, SyncMismatch, Timeout
from bridge.protocol import Completion, Generated, Limits, pack_ids, pack_logprobs, unpack_ids
from trainer_env.data import Example
from trainer_env.data.ordering import Schedule
from trainer_env.sampling import sampler as module
from trainer_env.sampling.rollouts import Rollouts
from trainer_env.sampling.sampler import Sampler

EOS = 2


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def answer(request, version=0, tokens=(7, 8, EOS), logprobs=None, reason: Any = "stop"):
    values = [-0.5] * len(tokens) if logprobs is None else logprobs
    one = Completion(pack_ids(list(tokens)), pack_logprobs(values), reason)
    return Generated(version=version, completions=(one,) * request.n)


class Server:
    """Answers each request by a function, at once, or not at all."""

    def __init__(self, reply=answer, max_context=512):
        limits = Limits(max_context=max_context, max_lora_rank=8, adapter_slots=2, max_in_flight=8)
        self.welcome: Any = SimpleNamespace(limits=limits, log_path="/log", restart_s=0.0)
        self.reply = reply
        self.requests = []
        self.futures: list[Future[Any]] = []

    def ask(self, request: Any, buffer: Any = None) -> Any:
        raise AssertionError("sampling does not wait")

    def submit(self, request: Any, buffer: Any = None) -> Future[Any]:
        self.requests.append(request)
        future: Future[Any] = Future()
        self.futures.append(future)
        try:
            reply = self.reply(request)
        except BridgeError as error:
            future.set_exception(error)
        else:
            if reply is not None:
                future.set_result(reply)
        return future


@pytest.fixture
def make(tokenizer, make_config):
    def make(server, *overrides, max_staleness=0, examples=("x",), eos_token_ids=(), ranks=1, rank=0):
        config = make_config("grpo.max_steps=20", "grpo.shuffle_dataset=false", *overrides)
        schedule = Schedule(config, [Example(asked(text)) for text in examples], rank=rank, ranks=ranks)
        sampler = Sampler(server, tokenizer, config, eos_token_ids=eos_token_ids)
        return Rollouts(sampler, config, schedule, max_staleness=max_staleness)

    return make


def trainer_at(step):
    return SimpleNamespace(state=SimpleNamespace(global_step=step))


def asked(text):
    return [{"role": "user", "content": text}]


def test_a_run_of_equal_prompts_is_one_request_and_rows_keep_their_order(make, tokenizer):
    def reply(request):
        first = unpack_ids(request.prompt)[-7]
        return Generated(
            version=0,
            completions=tuple(
                Completion(pack_ids([first, row, EOS]), pack_logprobs([-1.0, -2.0, -3.0 - row]), "stop")
                for row in range(request.n)
            ),
        )

    server = Server(reply)
    one, two = asked("one"), asked("two")
    result = make(server)([one] * 4 + [two] * 4 + [one] * 2, trainer_at(0))
    assert [request.n for request in server.requests] == [4, 4, 2]
    assert [ids[1] for ids in result["completion_ids"]] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [values[2] for values in result["logprobs"]] == [-3.0, -4.0, -5.0, -6.0, -3.0, -4.0, -5.0, -6.0, -3.0, -4.0]
    assert result["prompt_ids"][0] == result["prompt_ids"][9] != result["prompt_ids"][4]
    assert tokenizer.decode(result["prompt_ids"][4]).endswith("two<|im_end|>\n<|im_start|>assistant\n")
    assert result["finish_reason"] == ["stop"] * 10
    assert "env_mask" not in result


def test_two_groups_of_one_prompt_stay_two_requests(make):
    server = Server()
    make(server)([asked("one")] * 8, trainer_at(0))
    assert [request.n for request in server.requests] == [4, 4]


def test_sampling_is_what_the_config_says_and_ends_at_every_end_token(make):
    server = Server()
    overrides = ("grpo.temperature=0.7", "grpo.max_completion_length=5", "rollout.timeout_s=9")
    make(server, *overrides, eos_token_ids=(2, 5))([asked("x")] * 4, trainer_at(0))
    (request,) = server.requests
    assert (request.sampling.temperature, request.sampling.max_tokens) == (0.7, 5)
    assert request.sampling.stop_token_ids == (2, 5)
    assert (request.sampling.top_p, request.sampling.top_k, request.sampling.min_p) == (1.0, 0, 0.0)
    assert request.sampling.seed is None
    assert request.deadline_s == 9


@pytest.mark.parametrize(
    ("overrides", "bound", "step", "oldest"),
    [
        ([], 0, 5, 5),
        ([], 2, 5, 3),
        ([], 2, 1, 0),
        (["grpo.num_iterations=2"], 1, 4, 4),
        (["grpo.num_iterations=2"], 3, 4, 2),
        (["grpo.steps_per_generation=4", "grpo.gradient_accumulation_steps=2"], 1, 6, 6),
    ],
)
def test_versions_are_as_new_as_the_last_step_that_trains_on_them_demands(make, overrides, bound, step, oldest):
    server = Server(lambda request: answer(request, version=step))
    make(server, *overrides, "rollout.max_staleness=9", max_staleness=bound)([asked("x")] * 4, trainer_at(step))
    assert server.requests[0].min_version == oldest


@pytest.mark.parametrize("version", [3, 6])
def test_a_version_out_of_bounds_never_enters_training(make, version):
    server = Server(lambda request: answer(request, version=version))
    with pytest.raises(StaleVersion, match=f"version {version}; versions 4 to 5"):
        make(server, max_staleness=1)([asked("x")] * 4, trainer_at(5))


def test_reuse_beyond_the_bound_is_refused(make):
    with pytest.raises(ConfigError, match="2 optimizer steps"):
        make(Server(), "grpo.num_iterations=2", max_staleness=0)


def test_a_prompt_that_leaves_no_room_is_quoted(make):
    server = Server(max_context=100)
    rollouts = make(server, "grpo.max_completion_length=20")
    with pytest.raises(
        ConfigError, match=r"completion of up to 20 do not fit the context of 100 tokens.*begins: 'word word"
    ):
        rollouts([asked("word " * 80)] * 4, trainer_at(0))
    assert server.requests == []


def test_an_empty_completion_becomes_an_end_token_outside_the_loss(make):
    result = make(Server(lambda request: answer(request, tokens=())))([asked("x")] * 4, trainer_at(0))
    assert result["completion_ids"] == [[EOS]] * 4
    assert result["logprobs"] == [[0.0]] * 4
    assert result["env_mask"] == [[0]] * 4


def test_a_stopped_completion_without_its_end_token_gets_one_outside_the_loss(make):
    result = make(Server(lambda request: answer(request, tokens=(7,))))([asked("x")] * 4, trainer_at(0))
    assert result["completion_ids"] == [[7, EOS]] * 4
    assert result["env_mask"] == [[1, 0]] * 4


def test_a_truncated_completion_stays_as_it_is(make):
    result = make(Server(lambda request: answer(request, tokens=(7, 8), reason="length")))(
        [asked("x")] * 4, trainer_at(0)
    )
    assert result["completion_ids"] == [[7, 8]] * 4


def test_tokens_are_never_decoded_and_encoded_again(make, tokenizer):
    split = [*tokenizer("he")["input_ids"], *tokenizer("llo")["input_ids"], EOS]
    assert tokenizer(tokenizer.decode(split[:-1]))["input_ids"] != split[:-1]
    result = make(Server(lambda request: answer(request, tokens=split)))([asked("x")] * 4, trainer_at(0))
    assert result["completion_ids"] == [split] * 4


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (lambda request: answer(request, reason="abort"), EngineFailed, "broke a completion off"),
        (lambda request: answer(request, logprobs=[-1.0]), SyncMismatch, "3 tokens came with 1 logprobs"),
        (lambda request: answer(request, logprobs=[-1.0, float("nan"), -1.0]), SyncMismatch, "no numbers"),
        (lambda request: Generated(version=0, completions=()), SyncMismatch, "4 completions were asked for, and 0"),
    ],
)
def test_an_incomplete_answer_never_enters_training(make, reply, error, says):
    with pytest.raises(error, match=says):
        make(Server(reply))([asked("x")] * 4, trainer_at(0))


def test_one_failure_ends_the_other_requests(make):
    def reply(request):
        if len(server.requests) == 2:
            raise Busy("full")

    server = Server(reply)
    with pytest.raises(Busy):
        make(server)([asked("a")] * 4 + [asked("b")] * 4 + [asked("c")] * 4, trainer_at(0))
    assert [future.cancelled() for future in server.futures] == [True, False, True]


def test_waiting_has_an_end(make, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    server = Server(lambda request: None)
    with pytest.raises(Timeout, match="1 of 1 requests"):
        make(server, "rollout.timeout_s=0.01")([asked("x")] * 4, trainer_at(0))
    assert server.futures[0].cancelled()


def test_text_goes_without_the_chat_template(make, tokenizer):
    server = Server()
    make(server)(["2+2="] * 4, trainer_at(0))
    assert unpack_ids(server.requests[0].prompt) == tokenizer("2+2=")["input_ids"]


def test_an_answer_that_was_begun_is_continued(make, tokenizer):
    server = Server()
    make(server)([[*asked("2+2?"), {"role": "assistant", "content": "It is"}]] * 4, trainer_at(0))
    assert tokenizer.decode(unpack_ids(server.requests[0].prompt)).endswith("assistant\nIt is")


def test_a_model_without_a_chat_template_says_what_to_do(make, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError) as refused:
        make(Server())([asked("x")] * 4, trainer_at(0))
    assert "data.chat = false" in refused.value.remedy


def test_evaluation_is_greedy_and_under_the_version_it_names(make):
    server = Server(lambda request: answer(request, version=4))
    rollouts = make(server)
    groups = rollouts.sampler.sample([asked("x"), asked("y")], version=4)
    assert [(request.n, request.sampling.temperature, request.version) for request in server.requests] == [
        (1, 0.0, 4)
    ] * 2
    assert [len(group) for group in groups] == [1, 1]
    assert groups[0][0].version == 4
    assert rollouts.batches == []
    assert rollouts.calls == 0


def test_a_batch_says_what_it_took(make):
    rollouts = make(Server(lambda request: answer(request, version=2)), max_staleness=1)
    rollouts([asked("x")] * 4, trainer_at(3))
    (batch,) = rollouts.batches
    assert batch.versions == [2] * 4
    assert batch.tokens == 12
    assert batch.seconds > 0


def test_it_works_inside_a_running_event_loop(make):
    async def notebook_cell():
        return make(Server())([asked("x")] * 4, trainer_at(0))

    assert len(asyncio.run(notebook_cell())["completion_ids"]) == 4
