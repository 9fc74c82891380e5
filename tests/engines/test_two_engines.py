"""Two real engines behind one tandem-server, one of which is killed while it works."""

import asyncio
import os
import signal

import psutil
import pytest

import lora_files
from bridge import protocol as p
from served import generate, score, served

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

PROMPT = [5, 6, 7, 8, 9]
START_S = 900
SERVER = {"dtype": "float32", "context_length": 512, "cpu_kv_gib": 1, "data_parallel": 2, "lease_s": 1800.0}


async def publish(client, model, version):
    adapter = lora_files.make(model, version)
    return (await client.ask(adapter.publish(version, deadline_s=120.0), adapter.data)).version


async def scored(client):
    answer = await client.ask(score(PROMPT, deadline_s=120))
    return answer.version, p.unpack_logprobs(answer.logprobs)


def kill_worker(engine_pid):
    """SIGKILL to the process in which an engine computes."""
    family = psutil.Process(engine_pid).children(recursive=True)
    os.kill(max(family, key=lambda q: q.memory_info().rss).pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "backend",
    [
        "sglang",
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(
                os.environ.get("TANDEM_TEST_FULL") != "1", reason="takes minutes: set TANDEM_TEST_FULL=1"
            ),
        ),
    ],
)
async def test_one_of_two_is_killed_nothing_is_lost_and_it_comes_back_with_the_newest_version(
    backend, tiny, python_of, tmp_path
):
    program = [str(python_of(backend)), "-m", "server_env.cli"]
    wanted = {**SERVER, "backend": backend}
    async with served(tmp_path, tiny, fake=False, program=program, server=wanted, wait=False) as server:
        await server.ready(START_S)
        client = await server.client("run")
        assert await publish(client, tiny, 1) == 1
        long = generate(PROMPT, n=4, max_tokens=300, ignore_eos=True, deadline_s=900)
        asking = [asyncio.create_task(client.ask(long)) for _ in range(2)]
        async with asyncio.timeout(60):
            while (await client.ask(p.Status())).in_use != {1: 2}:
                pass
        one, two = (await client.ask(p.Status())).engine_pids
        kill_worker(two)
        assert await publish(client, tiny, 2) == 2
        expected = await scored(client)
        for answer in await asyncio.gather(*asking):
            assert answer.version == 1
            assert [len(p.unpack_ids(completion.token_ids)) for completion in answer.completions] == [300] * 4
        assert (await client.ask(p.Status())).requests == 3
        async with asyncio.timeout(START_S):
            while (await client.ask(p.Ping())).engines < 2:  # noqa: ASYNC110 (the server says it to those who ask)
                await asyncio.sleep(0.5)
        kill_worker(one)  # What answers now is the one that came back.
        version, logprobs = await scored(client)
        assert (version, logprobs) == (expected[0], pytest.approx(expected[1], abs=1e-4))
        assert (await client.ask(p.Status())).restarts in range(1, 7), server.log()  # The second may have begun.
        server.note_family()
