"""The server's side of the proof of sync: what a canary is asked, and that no engine serves that answers otherwise."""

import asyncio
import os
import signal

import pytest

import lora_files
from bridge import protocol as p
from bridge.errors import EngineFailed, Refused
from served import generate, score, served, until

pytestmark = pytest.mark.usefixtures("backend")

ROWS = ([5, 6, 7, 8, 9], [9, 8, 7, 6])
ENOUGH_S = 60.0


def canary_of(adapter, rows=ROWS):
    packed = tuple(map(p.pack_ids, rows))
    return p.Canary(digest=adapter.digest, adapter_config=adapter.config, rows=packed, deadline_s=ENOUGH_S)


async def ask(client, model, seed=1, rows=ROWS):
    adapter = lora_files.make(model, seed)
    return await client.ask(canary_of(adapter, rows), adapter.data)


def logprobs(packed):
    return [p.unpack_logprobs(row) for row in packed]


async def kill_engine(client):
    os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)


async def test_a_canary_is_scored_with_and_without_and_over_a_cached_prefix(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        found = await ask(client, model)
        base = [p.unpack_logprobs((await client.ask(score(row))).logprobs) for row in ROWS]
    assert logprobs(found.base) == base
    assert [len(row) for row in logprobs(found.adapted)] == [len(row) - 1 for row in ROWS]
    assert all(a != b for a, b in zip(logprobs(found.adapted), base, strict=True))
    assert p.unpack_logprobs(found.sampled) == pytest.approx(p.unpack_logprobs(found.rescored))
    assert len(p.unpack_logprobs(found.sampled)) == 8


async def test_a_canary_never_serves_and_leaves_nothing_in_the_engine(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        await ask(client, model)
        status = await client.ask(p.Status())
        assert (status.version, status.loaded, status.in_use) == (0, (), {})
        assert (await client.ask(generate(ROWS[0]))).version == 0
        assert [e["name"] for e in server.journal("unload")] == [e["name"] for e in server.journal("load")]
        adapter = lora_files.make(model, 2)
        assert (await client.ask(adapter.publish(1), adapter.data)).version == 1


async def test_a_canary_that_cannot_be_served_is_refused_by_name(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        for adapter, rows, named in (
            (lora_files.make(model, 1, rank=16), ROWS, "rank 16"),
            (lora_files.make(model, 1), ([5],), "two tokens or more"),
            (lora_files.make(model, 1), (), "two tokens or more"),
        ):
            with pytest.raises(Refused, match=named):
                await client.ask(canary_of(adapter, rows), adapter.data)


async def test_an_engine_that_ignores_adapters_answers_for_the_base_model(tmp_path, model):
    async with served(tmp_path, model, fault="ignores-adapter") as server:
        found = await ask(await server.client("run"), model)
    assert found.adapted == found.base


async def test_a_stale_cache_shows_in_what_is_sampled_and_not_in_scores(tmp_path, model):
    async with served(tmp_path, model, fault="stale-cache") as server:
        found = await ask(await server.client("run"), model)
    assert found.adapted != found.base
    assert p.unpack_logprobs(found.sampled) != pytest.approx(p.unpack_logprobs(found.rescored), abs=0.5)


async def test_after_a_restart_the_canary_is_asked_again_before_anybody_is_served(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        await ask(client, model)
        await kill_engine(client)
        assert (await client.ask(generate(ROWS[0]))).completions
        assert (await client.ask(p.Status())).restarts == 1
        second = server.journal("start")[1]["pid"]
        events = [entry["event"] for entry in server.journal() if entry["pid"] == second]
        assert "unload" in events[:-1]
        assert events[-1] == "generated"
        assert "this engine answers as the last one did" in server.log()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("ignores-adapter", "logprobs under the canary are"),
        ("drops-module:k_proj", "logprobs under the canary are"),
        ("other-base", "the base model's logprobs are"),
        ("stale-cache", "over a prefix that the base model had cached"),
    ],
)
async def test_an_engine_that_fails_its_canary_is_a_failed_start(tmp_path, model, fault, named):
    async with served(tmp_path, model, fault=f"{fault}@2") as server:
        client = await server.client("run")
        await ask(client, model)
        await kill_engine(client)
        assert (await client.ask(generate(ROWS[0], deadline_s=ENOUGH_S))).completions
        assert (await client.ask(p.Status())).restarts == 2
        assert named in server.log()
        assert len(server.journal("start")) == 3


async def test_engines_that_always_fail_their_canary_are_given_up(tmp_path, model):
    lives = ",".join(f"ignores-adapter@{life}" for life in (2, 3, 4))
    async with served(tmp_path, model, fault=lives) as server:
        client = await server.client("run")
        await ask(client, model)
        await kill_engine(client)
        with pytest.raises(EngineFailed, match="does not compute what it did: logprobs under the canary"):
            await client.ask(generate(ROWS[0], deadline_s=ENOUGH_S))


@pytest.mark.parametrize("fault", ["", "ignores-adapter"])
async def test_after_a_wake_the_canary_is_asked_before_anybody_is_answered(tmp_path, model, backend, fault):
    begins = tmp_path / "begins"
    faults = f"{fault}:{begins}@1" if fault else ""
    flags = {"VLLM_SERVER_DEV_MODE": "1"}
    async with served(tmp_path, model, fault=faults, server={"device": "cuda", "sleep": True}, environment=flags) as it:
        client = await it.client("run")
        await ask(client, model)
        await client.ask(p.Sleep())
        begins.touch()
        await client.ask(p.Wake(deadline_s=ENOUGH_S))
        assert (await client.ask(generate(ROWS[0], deadline_s=ENOUGH_S))).completions
        assert (await client.ask(p.Status())).restarts == (1 if fault else 0)
        starts, answers = it.journal("start"), it.journal("generated")
        assert answers[-1]["pid"] == starts[-1]["pid"]  # What the engine that failed had sampled is thrown away.
        await until(lambda: it.log().count("this engine answers as the last one did") == 1, "the log")


async def test_what_is_asked_after_a_wake_is_worked_on_beside_the_canary_and_answered_after_it(
    tmp_path, model, backend
):
    held = tmp_path / "goes on"
    flags = {"VLLM_SERVER_DEV_MODE": "1"}
    async with served(
        tmp_path, model, fault=f"load-holds:{held}", server={"device": "cuda", "sleep": True}, environment=flags
    ) as it:
        held.touch()
        client = await it.client("run")
        await ask(client, model)
        await client.ask(p.Sleep())
        held.unlink()  # From here on the canary is not loaded, and what does not need it goes on.
        await client.ask(p.Wake(deadline_s=ENOUGH_S))
        before = len(it.journal("generated"))
        answer = asyncio.create_task(client.ask(generate([42, 43], deadline_s=ENOUGH_S)))
        await until(lambda: len(it.journal("generated")) > before, "it to be sampled")
        asleep = asyncio.create_task(client.ask(p.Sleep(deadline_s=ENOUGH_S)))
        await asyncio.sleep(0.2)
        assert not answer.done()
        assert not asleep.done()
        held.touch()
        assert (await answer).completions
        await asleep
        assert it.log().count("this engine answers as the last one did") == 1
        assert (await client.ask(p.Status())).restarts == 0


async def test_a_sleep_right_after_a_wake_waits_for_the_canary(tmp_path, model, backend):
    flags = {"VLLM_SERVER_DEV_MODE": "1"}
    async with served(tmp_path, model, server={"device": "cuda", "sleep": True}, environment=flags) as it:
        client = await it.client("run")
        await ask(client, model)
        for turn in (1, 2, 3):
            await client.ask(p.Sleep(deadline_s=ENOUGH_S))
            assert it.log().count("this engine answers as the last one did") == turn - 1
            await client.ask(p.Wake(deadline_s=ENOUGH_S))
        await client.ask(p.Sleep(deadline_s=ENOUGH_S))
        assert it.log().count("this engine answers as the last one did") == 3
        assert (await client.ask(p.Status())).restarts == 0
