"""Real engines behind the real tandem-server: what is trained on is what was sampled, whatever happens meanwhile."""

import asyncio
import json
import os
import shutil
import signal
import time

import psutil
import pytest
import pytest_asyncio

import lora_files
from bridge import protocol as p
from bridge.errors import PeerDied, Refused
from bridge.guard import processes
from metrics_reader import read, read_until
from monitoring import shown
from served import Served, generate, score, served, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900), pytest.mark.slow]

PROMPT = [5, 6, 7, 8, 9]
EOS = 2
START_S = 600
TOLERANCE = 1e-3
MAX_RESTARTS = 3
"""As in the supervisor."""
SERVER = {"dtype": "float32", "context_length": 512, "cpu_kv_gib": 1, "stall_timeout_s": 60.0}
"""A KV cache of 1 GiB, and float32, in which the engine and Hugging Face agree to rounding."""


def program(python):
    return [str(python), "-m", "server_env.cli"]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def server(request, tiny, python_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    section = {**SERVER, "backend": request.param}
    async with served(
        folder, tiny, fake=False, program=program(python_of(request.param)), server=section, wait=False, lease_s=1800.0
    ) as it:
        it.backend = request.param
        await it.ready(START_S)
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    client = await server.client("run")
    # The tests below share a server whose versions only rise.
    client.published = 0
    return client


async def publish(client, adapter):
    client.published += 1
    return await client.ask(adapter.publish(client.published), adapter.data)


def sampled(answer):
    return [(p.unpack_ids(c.token_ids), p.unpack_logprobs(c.logprobs)) for c in answer.completions]


async def scored(client, ids, version=-1):
    return p.unpack_logprobs((await client.ask(score(ids, version=version, deadline_s=200))).logprobs)


def worker_of(engine_pid):
    """The process in which the engine computes."""
    return max(psutil.Process(engine_pid).children(recursive=True), key=lambda q: q.memory_info().rss)


async def test_the_engine_is_the_one_that_was_asked_for(client, server):
    welcome = client.welcome
    assert (welcome.engine, welcome.capabilities) == (server.backend, ("lora", "score"))
    assert (welcome.limits.max_context, welcome.limits.max_lora_rank, welcome.limits.vocab_size) == (512, 8, 512)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(client, reference, temperature):
    answer = await client.ask(generate(PROMPT, n=4, max_tokens=12, temperature=temperature, ignore_eos=True))
    pairs = sampled(answer)
    questions = [{"ids": PROMPT + ids, "temperature": temperature, "adapter": ""} for ids, _ in pairs]
    for (_, logprobs), expected in zip(pairs, reference.logprobs(questions), strict=True):
        assert logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)


async def test_scores_are_those_of_hugging_face_without_and_with_an_adapter(client, tiny, reference, tmp_path):
    adapter = lora_files.make(tiny, 21)
    folder = adapter.write(tmp_path / "adapter")
    await publish(client, adapter)
    ids = [*PROMPT, 300, 17, 44]
    questions = [{"ids": ids, "temperature": 1.0, "adapter": a} for a in ("", str(folder))]
    base, adapted = reference.logprobs(questions)
    assert await scored(client, ids, 0) == pytest.approx(base, abs=TOLERANCE)
    assert await scored(client, ids) == pytest.approx(adapted, abs=TOLERANCE)
    assert base != pytest.approx(adapted, abs=0.1)


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj", "v_proj"), ("up_proj",), ("o_proj", "down_proj")])
async def test_an_adapter_of_some_projections_is_served_whole(client, tiny, reference, tmp_path, targets):
    adapter = lora_files.make(tiny, 23, scale=0.4, targets=targets)
    folder = adapter.write(tmp_path / "adapter")
    await publish(client, adapter)
    base, adapted = reference.logprobs([{"ids": PROMPT, "temperature": 1.0, "adapter": a} for a in ("", str(folder))])
    assert await scored(client, PROMPT) == pytest.approx(adapted, abs=TOLERANCE)
    assert adapted != pytest.approx(base, abs=0.01)


async def test_sampling_under_an_adapter_is_sampling_from_that_adapter(client, tiny, reference, tmp_path):
    adapter = lora_files.make(tiny, 22)
    folder = adapter.write(tmp_path / "adapter")
    loaded = await publish(client, adapter)
    answer = await client.ask(generate(PROMPT, n=3, max_tokens=8, temperature=0.8, ignore_eos=True))
    assert answer.version == loaded.version
    pairs = sampled(answer)
    questions = [{"ids": PROMPT + ids, "temperature": 0.8, "adapter": str(folder)} for ids, _ in pairs]
    for (_, logprobs), expected in zip(pairs, reference.logprobs(questions), strict=True):
        assert logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)


async def test_a_new_version_does_not_see_the_prefix_cache_of_the_last_one(client, tiny, reference, tmp_path):
    """Three generations over one long prompt: cold and cached under one version, then under the next."""
    prompt = [5 + i % 200 for i in range(150)]
    await publish(client, lora_files.make(tiny, 31))
    for _ in range(2):
        await client.ask(generate(prompt, max_tokens=2, deadline_s=200))
    adapter = lora_files.make(tiny, 32)
    folder = adapter.write(tmp_path / "adapter")
    await publish(client, adapter)
    for _ in range(2):
        ((ids, logprobs),) = sampled(await client.ask(generate(prompt, max_tokens=4, ignore_eos=True, deadline_s=200)))
        (expected,) = reference.logprobs([{"ids": prompt + ids, "temperature": 1.0, "adapter": str(folder)}])
        assert logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=TOLERANCE)


async def test_an_adapters_files_are_read_once(client, server, tiny):
    name = (await publish(client, lora_files.make(tiny, 35))).name
    version = client.published
    before = await scored(client, PROMPT, version)
    (files,) = [path for folder in server.leftovers() for path in folder.rglob(name)]
    shutil.rmtree(files)
    await publish(client, lora_files.make(tiny, 36))
    for _ in range(3):
        answer = await client.ask(generate(PROMPT, n=2, version=version, max_tokens=3, deadline_s=200))
        assert answer.version == version
    assert await scored(client, PROMPT, version) == pytest.approx(before, abs=1e-4)
    await publish(client, lora_files.make(tiny, 37))  # It is retired without them.


async def test_a_version_can_be_pinned_while_a_newer_one_serves(client, tiny):
    await publish(client, lora_files.make(tiny, 41))
    pinned = client.published
    before = await scored(client, PROMPT)
    await publish(client, lora_files.make(tiny, 42))
    assert await scored(client, PROMPT, pinned) == pytest.approx(before, abs=1e-4)
    assert await scored(client, PROMPT) != pytest.approx(before, abs=0.01)


async def test_a_switch_does_not_disturb_what_is_in_flight(client, tiny, reference, tmp_path):
    in_flight, version, folder, running = False, 0, tmp_path, []
    for seed in range(510, 515):  # Where the test stands still, they may be answered before there is a switch.
        old = lora_files.make(tiny, seed)
        folder = old.write(tmp_path / f"adapter-{seed}")
        version = (await publish(client, old)).version
        running = [
            asyncio.create_task(client.ask(generate(PROMPT, n=8, max_tokens=400, ignore_eos=True, deadline_s=400)))
            for _ in range(2)
        ]
        async with asyncio.timeout(120):
            while (await client.ask(p.Status())).in_use.get(version) != 2 and not any(map(asyncio.Task.done, running)):
                pass
        await publish(client, lora_files.make(tiny, seed + 10))
        newest = await client.ask(generate(PROMPT, max_tokens=2, deadline_s=200))
        assert newest.version == client.published
        in_flight = (await client.ask(p.Status())).in_use == {version: 2}
        if in_flight:
            break
        await asyncio.gather(*running)
    assert in_flight
    for seed in (53, 54):
        await publish(client, lora_files.make(tiny, seed))
    pairs = [pair for task in running for pair in sampled(await task)]
    assert {task.result().version for task in running} == {version}
    questions = [{"ids": PROMPT + ids, "temperature": 1.0, "adapter": str(folder)} for ids, _ in pairs]
    for (_, logprobs), expected in zip(pairs, reference.logprobs(questions), strict=True):
        assert logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)


async def test_a_rank_above_the_servers_is_refused_and_the_old_version_serves_on(client, tiny):
    before = await scored(client, PROMPT)
    adapter = lora_files.make(tiny, 61, rank=16)
    with pytest.raises(Refused, match="rank 16 is above the server's limit of 8"):
        await client.ask(adapter.publish(client.published + 1), adapter.data)
    assert await scored(client, PROMPT) == pytest.approx(before, abs=1e-4)


async def test_an_adapter_of_another_model_is_refused_and_the_old_version_serves_on(client, tiny, tmp_path):
    before = await scored(client, PROMPT)
    config = json.loads((tiny / "config.json").read_text()) | {"hidden_size": 96}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    adapter = lora_files.make(other, 62)
    with pytest.raises(Refused, match="does not belong to the server's base model"):
        await client.ask(adapter.publish(client.published + 1), adapter.data)
    assert await scored(client, PROMPT) == pytest.approx(before, abs=1e-4)


async def test_a_completion_ends_with_the_models_end_of_sequence_token(client, tiny, reference):
    """At this temperature one token in a few hundred is the end; of 32 long completions some come to it."""
    answer = await client.ask(generate(PROMPT, n=32, version=0, max_tokens=200, temperature=1.3, deadline_s=300))
    stopped = [
        sample for sample, c in zip(sampled(answer), answer.completions, strict=True) if c.finish_reason == "stop"
    ]
    assert stopped
    for ids, logprobs in stopped:
        assert ids.index(EOS) == len(ids) - 1 == len(logprobs) - 1
    (ids, logprobs) = min(stopped, key=lambda sample: len(sample[0]))
    (expected,) = reference.logprobs([{"ids": PROMPT + ids, "temperature": 1.3, "adapter": ""}])
    assert logprobs == pytest.approx(expected[len(PROMPT) - 1 :], abs=TOLERANCE)


async def test_a_cancelled_group_frees_what_the_engine_held_for_it(client, tiny):
    """Nothing of it is left that could slow the next one down, or hold its adapter."""
    version = (await publish(client, lora_files.make(tiny, 65))).version
    asking = asyncio.create_task(client.ask(generate(PROMPT, n=8, max_tokens=450, ignore_eos=True, deadline_s=200)))
    async with asyncio.timeout(120):
        while (await client.ask(p.Status())).in_use.get(version) != 1:
            pass
    asking.cancel()
    async with asyncio.timeout(120):
        while (await client.ask(p.Status())).in_use:
            pass
    for seed in (66, 67, 68):
        await publish(client, lora_files.make(tiny, seed))
    assert (await client.ask(generate(PROMPT, max_tokens=2, deadline_s=200))).version == client.published
    assert (await client.ask(p.Status())).restarts == 0


async def test_one_page_has_the_engines_figures_and_ours_and_what_the_dashboard_shows(client, server):
    before = await read(server)
    answer = await client.ask(generate(PROMPT, n=2, max_tokens=9, ignore_eos=True, deadline_s=200))
    tokens = sum(len(ids) for ids, _ in sampled(answer))
    name, own = f"{server.backend}:generation_tokens_total", "tandem_generated_tokens_total"
    page = await read_until(server, lambda page: page.value(name) >= before.value(name) + tokens)
    assert page.value(own) == before.value(own) + tokens
    assert page.value("tandem_engine_ready") == 1
    assert page.value("tandem_adapter_version") == client.published
    assert shown(f"{server.backend}:") <= page.names


async def test_sixty_versions_in_a_row_each_serve_and_memory_stays_bounded(client, server, tiny, capsys):
    pid = (await client.ask(p.Status())).engine_pid

    def resident():
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(process.memory_info().rss for process in family)

    loads, seen, early = [], set(), 0
    for seed in range(100, 160):
        loaded = await publish(client, lora_files.make(tiny, seed, rank=8))
        loads.append(loaded.load_s)
        answer = await client.ask(generate(PROMPT, max_tokens=2, ignore_eos=True))
        assert answer.version == loaded.version
        seen.add(tuple(await scored(client, PROMPT)))
        if seed == 119:
            early = resident()
    assert len(seen) == 60
    assert resident() - early < 64 << 20
    with capsys.disabled():
        print(f"\n{server.backend} loads an adapter in {1000 * sorted(loads)[len(loads) // 2]:.0f} ms")
    assert len((await client.ask(p.Status())).loaded) == 2


async def test_throughput_of_many_groups_at_once(client):
    """No figure is asserted: groups at once must simply all come back, whole."""
    answers = await asyncio.gather(
        *(client.ask(generate([5 + i, 6, 7], n=4, max_tokens=16, ignore_eos=True, deadline_s=400)) for i in range(64))
    )
    assert all(len(ids) == 16 for answer in answers for ids, _ in sampled(answer))


def came_back(restarts: int, server: Served, capsys) -> bool:
    """Whether it took one restart, or a few. SGLang was seen to need a second try: then its log says why."""
    if restarts > 1:
        with capsys.disabled():
            print(f"\n{server.backend} needed {restarts} tries to come back:\n{server.log()[-6000:]}")
    return 1 <= restarts <= MAX_RESTARTS


async def test_a_killed_engine_comes_back_with_its_versions_and_answers_what_was_asked(client, server, capsys):
    before = await scored(client, PROMPT)
    status = await client.ask(p.Status())
    asking = asyncio.create_task(client.ask(generate(PROMPT, n=8, max_tokens=400, ignore_eos=True, deadline_s=400)))
    async with asyncio.timeout(120):
        while not (await client.ask(p.Status())).in_use:
            pass
    old = server.note_family() - {server.process.pid}
    os.kill(worker_of(status.engine_pid).pid, signal.SIGKILL)
    answer = await asking
    assert answer.version == status.version
    assert all(len(ids) == 400 for ids, _ in sampled(answer))
    async with asyncio.timeout(400):  # On a slow machine all may have been sampled just before it was killed.
        while (after := await client.ask(p.Status())).restarts == status.restarts:  # noqa: ASYNC110 (asked, it says)
            await asyncio.sleep(0.1)
    assert came_back(after.restarts - status.restarts, server, capsys)
    assert after.engine_pid != status.engine_pid
    assert await scored(client, PROMPT) == pytest.approx(before, abs=1e-4)
    assert not old & processes().keys()


async def test_a_frozen_engine_is_replaced_and_what_was_asked_is_answered(client, server, capsys):
    before = await scored(client, PROMPT)
    status = await client.ask(p.Status())
    old = server.note_family() - {server.process.pid}
    os.kill(worker_of(status.engine_pid).pid, signal.SIGSTOP)
    answer = await client.ask(generate(PROMPT, n=2, max_tokens=20, ignore_eos=True, deadline_s=800))
    assert answer.version == status.version
    assert all(len(ids) == 20 for ids, _ in sampled(answer))
    assert came_back((await client.ask(p.Status())).restarts - status.restarts, server, capsys)
    assert await scored(client, PROMPT) == pytest.approx(before, abs=1e-4)
    assert not old & processes().keys()


async def test_when_the_gateway_is_killed_its_engine_ends_too(client, server, capsys):
    """Last in this file: it ends the server that the others share."""
    family = server.note_family()
    assert len(family) > 3
    started = time.monotonic()
    asking = asyncio.create_task(client.ask(generate(PROMPT, n=8, max_tokens=400, ignore_eos=True, deadline_s=400)))
    server.process.kill()
    with pytest.raises(PeerDied):
        await asking
    await until(lambda: not family & processes().keys(), "the engine's family to be gone", 120)
    with capsys.disabled():
        print(f"\n{server.backend}'s family is gone after {time.monotonic() - started:.1f} s")
