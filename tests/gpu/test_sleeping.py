"""Real engines that give their GPU memory back and take it again: what the driver counts, and what they answer then."""

import asyncio
import random

import pytest
import pytest_asyncio

import lora_files
from bridge import protocol as p
from served import environment_python, generate, score, served
from server_env.gpus.gpu_memory import used_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

GIB = 2**30
START_S = 500
SHARE = 0.2
ROW = [random.Random(1).randrange(4, 512) for _ in range(48)]
TOLERANCE = 0.15
"""bfloat16: another order of summation moves a logprob by 0.05 in the mean."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def server(request, tiny, engine_settings, tmp_path_factory):
    section = {
        "backend": request.param,
        "device": "cuda",
        "context_length": 512,
        "memory_share": SHARE,
        "sleep": True,
        "cuda_graphs": False,
    }
    before = used_bytes()
    async with served(
        tmp_path_factory.mktemp(request.param),
        tiny,
        fake=False,
        program=[str(environment_python(f"server-{request.param}")), "-m", "server_env.cli"],
        server=section,
        engine=engine_settings.get(request.param, {}),
        wait=False,
        lease_s=1800.0,
    ) as it:
        await it.ready(START_S)
        yield it
    for _ in range(100):
        if used_bytes() <= before + GIB // 4:
            break
        await asyncio.sleep(0.1)
    assert used_bytes() <= before + GIB // 4, "memory of an engine that has ended is still in use"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(server):
    client = await server.client("run")
    client.published = 0
    return client


async def publish(client, model, seed):
    client.published += 1
    adapter = lora_files.make(model, seed, rank=8)
    return await client.ask(adapter.publish(client.published), adapter.data)


async def scored(client, version):
    return p.unpack_logprobs((await client.ask(score(ROW, version=version, deadline_s=60))).logprobs)


def apart(ours, theirs):
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


async def test_sleep_frees_most_of_what_the_engine_holds_and_says_how_much(client, tiny):
    await publish(client, tiny, 1)
    await client.ask(generate(ROW, max_tokens=4, deadline_s=60))
    awake = used_bytes()
    slept = await client.ask(p.Sleep(deadline_s=60))
    asleep = used_bytes()
    woken = await client.ask(p.Wake(deadline_s=60))
    print(f"\nfreed {slept.freed_bytes / GIB:.2f} GiB, sleep {slept.seconds:.3f} s, wake {woken.seconds:.3f} s")
    assert slept.freed_bytes > 10 * GIB
    assert awake - asleep == pytest.approx(slept.freed_bytes, abs=GIB // 4)
    assert used_bytes() == pytest.approx(awake, abs=GIB)


async def test_after_a_wake_it_answers_what_it_did(client, tiny):
    await publish(client, tiny, 2)
    version = client.published
    before = await scored(client, version), await scored(client, 0)
    assert apart(*before) > 1.5 * TOLERANCE
    for _ in range(3):
        await client.ask(p.Sleep(deadline_s=60))
        await client.ask(p.Wake(deadline_s=60))
    assert apart(await scored(client, version), before[0]) < TOLERANCE
    assert apart(await scored(client, 0), before[1]) < TOLERANCE


async def test_an_adapter_that_is_published_while_it_sleeps_serves_when_it_wakes(client, tiny):
    await publish(client, tiny, 3)
    old = client.published
    before = await scored(client, old)
    await client.ask(p.Sleep(deadline_s=60))
    await publish(client, tiny, 4)
    waiting = asyncio.create_task(client.ask(generate(ROW, max_tokens=4, deadline_s=60)))
    await client.ask(p.Wake(deadline_s=60))
    assert (await waiting).version == client.published == old + 1
    assert apart(await scored(client, client.published), before) > TOLERANCE


async def test_fifty_turns_leave_memory_as_it_was(client, tiny):
    awake, asleep = [], []
    for seed in range(100, 150):
        await publish(client, tiny, seed)
        await client.ask(generate(ROW, max_tokens=2, deadline_s=60))
        awake.append(used_bytes())
        await client.ask(p.Sleep(deadline_s=60))
        asleep.append(used_bytes())
        await client.ask(p.Wake(deadline_s=60))
    assert max(awake[10:]) - min(awake[10:]) < GIB // 2
    assert max(asleep[10:]) - min(asleep[10:]) < GIB // 2
