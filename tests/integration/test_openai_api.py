"""The engines' OpenAI API for people: it keeps the rules by which the trainer asks, and ends no engine."""

import asyncio
import contextlib
import os
import signal

import aiohttp
import pytest

from bridge import protocol as p
from served import program_after, publish, served, until

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]
ROUTE = "/v1/completions"
BASE = {"vllm": "base", "sglang": "model"}
ASLEEP = {"device": "cuda", "sleep": True}


def ask(model: str, **changes) -> dict:
    return {"model": model, "prompt": PROMPT, "max_tokens": 3, "temperature": 1.0, **changes}


@contextlib.asynccontextmanager
async def people(tmp_path, model, **options):
    """A server, its trainer's client, and somebody's connection."""
    async with served(tmp_path, model, http="127.0.0.1:0", **options) as server:
        client = await server.client("run")
        async with aiohttp.ClientSession(client.welcome.http_url) as http:
            yield server, client, http


async def test_an_engine_that_sleeps_is_not_asked_and_the_answer_says_why(tmp_path, model, backend):
    async with people(tmp_path, model, server=ASLEEP) as (server, client, http):
        await client.ask(p.Sleep())
        async with http.post(ROUTE, json=ask(BASE[backend])) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert "sleeps" in (await answer.json())["error"]["message"]
        async with http.get("/health") as answer:
            assert answer.status == 200
            assert await answer.json() == {"engine": "ready", "asleep": True}
        assert (await http.get("/v1/models")).status == 200
        assert not server.journal("generated-asleep")
        await client.ask(p.Wake())
        assert (await http.post(ROUTE, json=ask(BASE[backend]))).status == 200
        assert (await client.ask(p.Status())).restarts == 0


async def test_a_sleep_waits_for_a_request_in_flight(tmp_path, model, backend):
    gate = tmp_path / "gate"
    async with people(tmp_path, model, server=ASLEEP, fault=f"holds:{gate}") as (server, client, http):
        asked = asyncio.create_task(http.post(ROUTE, json=ask(BASE[backend])))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        sleeping = asyncio.create_task(client.ask(p.Sleep()))
        assert (await client.ask(p.Ping())).in_flight == 1
        assert not server.journal("sleep")
        gate.touch()
        async with await asked as answer:
            assert answer.status == 200
            await answer.read()
        await sleeping
        order = [entry["event"] for entry in server.journal() if entry["event"] in ("generated", "sleep")]
        assert order[-2:] == ["generated", "sleep"]


def under(backend, adapter):
    """The ways in which a request names an adapter."""
    if backend == "vllm":
        return [ask(adapter)]
    return [ask(f"model:{adapter}"), ask("model", lora_path=adapter)]


async def test_a_version_stays_while_it_is_asked_and_then_goes(tmp_path, model, backend):
    gate = tmp_path / "gate"
    async with people(tmp_path, model, fault=f"holds:{gate}", max_staleness=0, adapters_held=4) as (
        server,
        client,
        http,
    ):
        await publish(client, model, 1)
        wanted = under(backend, "policy-v000001")
        asked = [asyncio.create_task(http.post(ROUTE, json=one)) for one in wanted]
        await until(lambda: len(server.journal("asked")) == len(wanted), "the requests to reach the engine")
        await publish(client, model, 2)
        assert (await client.ask(p.Status())).in_use == {1: len(wanted)}
        for one in wanted:
            assert (await http.post(ROUTE, json=one)).status == 404
        assert not server.journal("unload")
        gate.touch()
        for answer in await asyncio.gather(*asked):
            assert answer.status == 200
            await answer.read()
        await until(lambda: server.journal("unload"), "the version to go")
        assert (await client.ask(p.Status())).restarts == 0


async def test_an_adapter_that_was_never_served_is_refused(tmp_path, model, backend):
    async with people(tmp_path, model) as (server, _, http):
        for one in under(backend, "policy-v000007"):
            async with http.post(ROUTE, json=one) as answer:
                assert answer.status == 404
                assert "policy-v000007" in (await answer.json())["error"]["message"]
        assert not server.journal("asked")


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": [5, 600]},
        {"prompt": [[5], [600]]},
        {"prompt": [-1]},
        {"prompt": [[5], []]},
        {"prompt": ["600", 5]},
        {"prompt": [600.0]},
        {"input_ids": [600]},
    ],
    ids=str,
)
async def test_a_prompt_that_would_end_an_engine_is_refused(tmp_path, model, backend, wrong):
    async with people(tmp_path, model) as (server, client, http):
        async with http.post(ROUTE, json=ask(BASE[backend]) | wrong) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["type"] == "invalid_request_error"
        assert not server.journal("asked")
        assert (await client.ask(p.Status())).restarts == 0


async def test_an_answer_comes_as_it_is_made_and_half_of_one_does_not_look_whole(tmp_path, model, backend):
    if backend == "vllm":
        pytest.skip("The fake one answers in one piece.")
    gate = tmp_path / "gate"
    async with people(tmp_path, model, fault=f"holds:{gate}") as (server, client, http):
        async with http.post(ROUTE, json=ask("model", stream=True)) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert "one" in (await answer.content.readline()).decode()
            gate.touch()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        gate.unlink()
        async with http.post(ROUTE, json=ask("model", stream=True)) as answer:
            await answer.content.readline()
            await until(lambda: len(server.journal("asked")) == 2, "the request to reach the engine")
            os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
            with pytest.raises(aiohttp.ClientError):
                await answer.read()


async def test_a_sleep_does_not_wait_for_long_answers_of_people(tmp_path, model, backend):
    brief = program_after("from server_env.metrics import openai_api\nopenai_api.PEOPLE_S = 0.5")
    held = {"fault": f"holds:{tmp_path / 'never'}", "program": brief, "server": ASLEEP}
    async with people(tmp_path, model, **held) as (server, client, http):
        async with http.post(ROUTE, json=ask(BASE[backend])) as answer:
            if backend == "vllm":  # The other one has begun to answer.
                assert answer.status == 504
                assert "ask for fewer tokens" in (await answer.json())["error"]["message"]
            else:
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
        await client.ask(p.Sleep())
        assert server.journal("sleep")
