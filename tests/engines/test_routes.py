"""Each HTTP route of an engine that Tandem uses, asked of the fake one and of the real ones: the same assertions hold.

The fake stands in for real engines in tests of faults only; this is what keeps it honest.
"""

import asyncio
import contextlib
import shutil
import sys
import uuid

import pytest
import pytest_asyncio

import lora_files
from bridge.errors import Refused
from bridge.protocol import Sampling, unpack_ids, unpack_logprobs
from engines.alone import MODULES, engine_of, running
from served import FAKE
from server_env.adapters.canary import over_a_cached_prefix
from server_env.engines.engine import EngineGone
from trainer_env.proof import comparisons

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

PROMPT = [5, 6, 7, 8, 9]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fake-vllm", "fake-sglang", "vllm", "sglang"])
async def started(request, tiny, python_of, tmp_path_factory):
    backend = request.param.removeprefix("fake-")
    command = FAKE if request.param != backend else [str(python_of(backend)), "-m", MODULES[backend]]
    async with running(engine_of(backend, command, tiny), tmp_path_factory.mktemp(request.param)) as it:
        yield it


@pytest.fixture(scope="module")
def engine(started):
    return started[0]


@pytest_asyncio.fixture(loop_scope="module")
async def adapter(engine, tiny, tmp_path):
    """A loaded adapter's name."""
    name = f"policy-{uuid.uuid4().hex}"
    await engine.load_adapter(name, lora_files.make(tiny, 3).write(tmp_path / name))
    yield name
    with contextlib.suppress(Refused):
        await engine.unload_adapter(name)


async def test_facts(started):
    _, facts = started
    assert facts.version
    assert facts.max_context == 128
    assert facts.capabilities == {"lora", "score"}


async def test_completions_have_ids_logprobs_and_a_finish_reason(engine):
    found = await engine.generate("", PROMPT, 3, Sampling(max_tokens=6, temperature=0.7, ignore_eos=True))
    assert len(found) == 3
    for completion in found:
        assert len(unpack_ids(completion.token_ids)) == len(unpack_logprobs(completion.logprobs)) == 6
        assert max(unpack_logprobs(completion.logprobs)) <= 0
        assert completion.finish_reason == "length"
    assert len({completion.token_ids for completion in found}) > 1


async def test_greedy_sampling_repeats(engine):
    first, second = [await engine.generate("", PROMPT, 1, Sampling(max_tokens=5, temperature=0)) for _ in range(2)]
    assert first[0].token_ids == second[0].token_ids


async def test_a_seed_is_used_or_refused(engine):
    """SGLang takes a seed in silence and samples as if there was none."""
    sampling = Sampling(max_tokens=5, seed=11)
    if engine.name == "sglang":
        with pytest.raises(Refused, match="seed") as caught:
            await engine.generate("", PROMPT, 1, sampling)
        assert "enable-deterministic-inference" in caught.value.remedy
    else:
        first, second = [await engine.generate("", PROMPT, 1, sampling) for _ in range(2)]
        assert first == second


async def test_logprobs_are_those_of_the_cut_distribution_where_top_k_cuts_it(engine):
    (one,) = await engine.generate("", PROMPT, 1, Sampling(max_tokens=3, top_k=1, ignore_eos=True))
    assert unpack_logprobs(one.logprobs) == pytest.approx((0, 0, 0), abs=1e-4)
    found = await engine.generate("", PROMPT, 8, Sampling(max_tokens=1, top_k=2, temperature=1.3, ignore_eos=True))
    seen = {unpack_ids(c.token_ids)[0]: unpack_logprobs(c.logprobs)[0] for c in found}
    assert len(seen) <= 2
    assert len(seen) == 1 or sum(2.718281828**logprob for logprob in seen.values()) == pytest.approx(1, abs=1e-3)


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine):
    free = (await engine.generate("", PROMPT, 1, Sampling(max_tokens=5, temperature=0, ignore_eos=True)))[0]
    last = unpack_ids(free.token_ids)[2]
    first_at = unpack_ids(free.token_ids).index(last)
    stopped = (
        await engine.generate(
            "", PROMPT, 1, Sampling(max_tokens=5, temperature=0, stop_token_ids=(last,), ignore_eos=True)
        )
    )[0]
    assert stopped.finish_reason == "stop"
    assert unpack_ids(stopped.token_ids) == unpack_ids(free.token_ids)[: first_at + 1]


async def test_a_completion_ends_with_the_context(engine):
    found = await engine.generate("", [5] * 120, 1, Sampling(max_tokens=50, ignore_eos=True))
    assert len(unpack_ids(found[0].token_ids)) == 8
    assert found[0].finish_reason == "length"


async def test_scores_do_not_depend_on_how_was_sampled(engine):
    found = await engine.score("", PROMPT)
    assert len(found) == len(PROMPT) - 1
    assert max(found) < 0
    assert found == await engine.score("", PROMPT)
    assert found[:2] == pytest.approx(await engine.score("", PROMPT[:3]), abs=1e-4)


async def test_a_score_is_the_logprob_that_sampling_reports_at_temperature_one(engine):
    completion = (await engine.generate("", PROMPT, 1, Sampling(max_tokens=4, ignore_eos=True)))[0]
    scored = await engine.score("", PROMPT + unpack_ids(completion.token_ids))
    assert scored[-4:] == pytest.approx(unpack_logprobs(completion.logprobs), abs=1e-3)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [([], "400"), ([5] * 128, "400"), ([5] * 500, "400"), ([600], "vocabulary")],
)
async def test_a_prompt_that_cannot_be_is_refused(engine, prompt, named):
    with pytest.raises(Refused, match=named):
        await engine.generate("", prompt, 1, Sampling(max_tokens=4))


async def test_a_temperature_that_vllm_does_not_take_is_refused(engine):
    with pytest.raises(Refused, match="temperature"):
        await engine.generate("", PROMPT, 1, Sampling(temperature=-1.0))


async def test_an_unknown_adapter_is_refused_and_never_answered_by_the_base_model(engine):
    with pytest.raises(Refused, match="404"):
        await engine.generate("nobody", PROMPT, 1, Sampling())


async def test_an_adapter_changes_what_is_answered_and_leaves_the_base_model_alone(engine, adapter):
    base = await engine.score("", PROMPT)
    assert await engine.score(adapter, PROMPT) != pytest.approx(base, abs=0.01)
    assert await engine.score("", PROMPT) == pytest.approx(base, abs=1e-4)
    assert len(await engine.generate(adapter, PROMPT, 2, Sampling(max_tokens=3))) == 2


async def test_a_name_is_loaded_once(engine, adapter, tiny, tmp_path):
    with pytest.raises(Refused, match="already"):
        await engine.load_adapter(adapter, lora_files.make(tiny, 4).write(tmp_path / "again"))


async def test_an_unloaded_name_is_gone(engine, adapter):
    await engine.unload_adapter(adapter)
    with pytest.raises(Refused, match="404"):
        await engine.generate(adapter, PROMPT, 1, Sampling())
    with pytest.raises(Refused, match="404"):
        await engine.unload_adapter(adapter)


async def test_a_name_used_twice_meets_a_stale_prefix_cache_on_vllm_and_the_proof_of_sync_says_so(
    started, request, tiny, tmp_path
):
    """vLLM caches under an adapter's name and path, SGLang under each load. Tandem uses no name twice."""
    engine, _ = started
    expected = {"vllm": "disagrees", "sglang": "agrees"}
    if (which := request.node.callspec.params["started"]) not in expected:
        pytest.skip("the fake engines cache nothing")
    folder, verdicts = tmp_path / "same", []
    for seed in (11, 12):
        shutil.rmtree(folder, ignore_errors=True)
        await engine.load_adapter("same", lora_files.make(tiny, seed, rank=8, scale=0.2).write(folder))
        found = await over_a_cached_prefix(engine, "same", [4 + 7 * i % 500 for i in range(68)])
        verdicts.append(comparisons.cached_prefix(*found, comparisons.NOISE_FLOOR).verdict)
        await engine.unload_adapter("same")
    assert verdicts == ["agrees", expected[which]]


async def test_an_adapter_that_is_not_there_or_does_not_fit_is_refused(engine, tiny, tmp_path):
    with pytest.raises(Refused):
        await engine.load_adapter("missing", tmp_path / "missing")
    with pytest.raises(Refused, match="rank"):
        await engine.load_adapter("high", lora_files.make(tiny, 4, rank=16).write(tmp_path / "high"))
    assert await engine.score("", PROMPT)


async def test_progress_grows_with_work_and_only_with_work(engine):
    before = -1
    async with asyncio.timeout(120):  # What was asked before may still be counted.
        while (now := await engine.progress()) != before:
            before = now
            await asyncio.sleep(0.5)
    await engine.generate("", PROMPT, 1, Sampling(max_tokens=3, ignore_eos=True))
    async with asyncio.timeout(120):
        while await engine.progress() < before + 8:  # noqa: ASYNC110 (the counter is in another process)
            await asyncio.sleep(0.05)


async def test_a_cancelled_request_leaves_nothing_running(engine):
    asking = asyncio.create_task(engine.generate("", PROMPT, 4, Sampling(max_tokens=100, ignore_eos=True)))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await engine.generate("", PROMPT, 1, Sampling(max_tokens=1))


async def test_routes_that_change_the_engine_are_closed(engine):
    """vLLM's are not there; SGLang's want a key that the HTTP API for people does not carry."""
    for method, route in (("POST", "/sleep"), ("POST", "/collective_rpc"), ("POST", "/load_lora_adapter_from_tensors")):
        async with engine.http().request(method, route, json={}) as answer:
            assert answer.status in (401, 403, 404)


async def test_without_a_key_a_loopback_port_answers_nobody(engine):
    if engine.name != "sglang":
        pytest.skip("vLLM listens on a Unix socket")
    for route in ("/generate", "/v1/completions", "/load_lora_adapter", "/abort_request", "/flush_cache"):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer guess"}):
            async with engine.http().post(route, json={}, headers=headers) as answer:
                assert answer.status == 401


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
async def test_a_closed_connection_is_a_lost_engine(tiny, backend):
    engine = engine_of(backend, [sys.executable], tiny)
    with pytest.raises(EngineGone):
        await engine.score("", PROMPT)
