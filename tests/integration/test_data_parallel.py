"""One server with two engines: who is asked, what happens when one is lost, and that no version is asked of either too
early.
"""

import asyncio
import os
import signal
from collections import Counter

import aiohttp
import pytest

from bridge import protocol as p
from bridge.errors import EngineFailed
from served import generate, publish, score, served, until

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]
TWO = {"data_parallel": 2}


async def pids(client):
    return (await client.ask(p.Status())).engine_pids


async def kill(client, engine):
    os.kill((await pids(client))[engine], signal.SIGKILL)


async def serving(client, engines, timeout_s=120.0):
    """Wait until so many answer."""
    async with asyncio.timeout(timeout_s):
        while (await client.ask(p.Ping())).engines != engines:  # noqa: ASYNC110 (the server says it to those who ask)
            await asyncio.sleep(0.02)


def events_of(server, pid):
    """What one life of an engine was asked, in order."""
    return [entry for entry in server.journal() if entry["pid"] == pid]


def loads_of(server, pid):
    return [entry["name"] for entry in events_of(server, pid) if entry["event"] == "load"]


async def test_killing_one_of_two_loses_no_request_and_doubles_none(tmp_path, model):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, server=TWO, fault=f"holds:{gate},starts-when:{gate}@2") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        prompts = [[5, 6, 7, i] for i in range(10, 60)]
        asking = [asyncio.create_task(client.ask(generate(prompt, n=2, deadline_s=200))) for prompt in prompts]
        await until(lambda: len(server.journal("asked")) == 50, "all requests to be in flight")
        one, two = await pids(client)
        assert Counter(entry["pid"] for entry in server.journal("asked")) == {one: 25, two: 25}
        os.kill(two, signal.SIGKILL)
        await until(lambda: len(server.journal("asked")) == 75, "the lost ones to be asked of the other engine")
        assert Counter(entry["pid"] for entry in server.journal("asked")) == {one: 50, two: 25}
        gate.touch()
        answers = await asyncio.gather(*asking)
        assert [(answer.version, len(answer.completions)) for answer in answers] == [(1, 2)] * 50
        made = [entry for entry in server.journal("generated") if entry["prompt"] in prompts]
        assert sorted(entry["prompt"] for entry in made) == prompts
        assert (await client.ask(p.Status())).requests == 50
        await serving(client, 2)
        assert (await client.ask(p.Status())).restarts == 1


async def test_a_version_serves_while_an_engine_is_away_and_that_one_comes_back_with_the_newest(tmp_path, model):
    """It is published while the engine that comes back is busy loading the older ones."""
    gate = tmp_path / "gate"
    async with served(tmp_path, model, server=TWO, fault=f"load-holds:{gate}@2#1") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        await kill(client, 1)
        await until(lambda: len(server.journal("load")) == 3, "the next life to load version 1")
        assert (await publish(client, model, 2)).version == 2
        answers = [await client.ask(score(PROMPT)) for _ in range(4)]
        assert {answer.version for answer in answers} == {2}
        assert (await client.ask(p.Ping())).engines == 1
        gate.touch()
        await serving(client, 2)
        alone, back = await pids(client)
        assert loads_of(server, back) == ["policy-v000001", "policy-v000002"]
        for _ in range(50):  # They may come one after another; then one engine is enough for all.
            together = await asyncio.gather(*(client.ask(score(PROMPT)) for _ in range(20)))
            assert {answer.logprobs for answer in together} == {answers[0].logprobs}
            if len({entry["pid"] for entry in server.journal("asked")}) == 2:
                break
        assert {entry["pid"] for entry in server.journal("asked")} == {alone, back}
        await publish(client, model, 3)
        assert loads_of(server, back)[-1] == loads_of(server, alone)[-1] == "policy-v000003"


async def test_an_engine_that_comes_back_while_a_version_is_loaded_gets_it_before_it_becomes_the_newest(
    tmp_path, model
):
    gate, back_up = tmp_path / "gate", tmp_path / "back-up"
    gate.touch()
    fault = f"load-holds:{gate}#0,starts-when:{back_up}@2#1"
    async with served(tmp_path, model, server=TWO, fault=fault) as server:
        client = await server.client("run")
        await publish(client, model, 1)
        await kill(client, 1)
        await serving(client, 1)
        gate.unlink()
        publishing = asyncio.create_task(publish(client, model, 2))
        await until(lambda: len(server.journal("load")) == 3, "the other one to load version 2")
        back_up.touch()
        await serving(client, 2)
        _, back = await pids(client)
        assert loads_of(server, back) == ["policy-v000001"]
        assert {(await client.ask(score(PROMPT))).version for _ in range(4)} == {1}
        assert not publishing.done()
        gate.touch()
        assert (await publishing).version == 2
        assert loads_of(server, back) == ["policy-v000001", "policy-v000002"]


async def test_what_was_retired_while_an_engine_came_back_is_forgotten_there_too(tmp_path, model):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, server=TWO, fault=f"load-holds:{gate}@2#1") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        await kill(client, 1)
        await until(lambda: len(server.journal("load")) == 3, "the next life to load version 1")
        for version in (2, 3):
            await publish(client, model, version)
        gate.touch()
        await serving(client, 2)
        _, back = await pids(client)
        happened = [(e["event"], e["name"]) for e in events_of(server, back) if e["event"] in ("load", "unload")]
        assert happened[0] == ("load", "policy-v000001")
        assert set(happened[1:]) == {("unload", "policy-v000001"), *(("load", f"policy-v00000{v}") for v in (2, 3))}


async def test_requests_under_way_when_both_die_are_answered_by_their_next_lives(tmp_path, model):
    async with served(tmp_path, model, server=TWO, fault="hangs@1") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        asking = [asyncio.create_task(client.ask(generate([5, 6, i], deadline_s=200))) for i in range(10, 30)]
        await until(lambda: len(server.journal("asked")) == 20, "all requests to be in flight")
        for pid in await pids(client):
            os.kill(pid, signal.SIGKILL)
        assert {(await task).version for task in asking} == {1}
        assert len([entry for entry in server.journal("generated") if entry["prompt"][0] == 5]) == 20
        await serving(client, 2)
        assert (await client.ask(p.Status())).restarts == 2


async def test_a_group_stays_together_and_counts_for_as_many_as_it_has(tmp_path, model):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, server=TWO, fault=f"holds:{gate}") as server:
        client = await server.client("run")
        asking = [asyncio.create_task(client.ask(generate(PROMPT, n=8)))]
        await until(lambda: server.journal("asked"), "the group to be in flight")
        for i in range(2, 9):
            asking.append(asyncio.create_task(client.ask(generate(PROMPT))))
            await until(lambda i=i: len(server.journal("asked")) == i, f"{i} requests in flight")
        one, two = await pids(client)
        assert [entry["pid"] for entry in server.journal("asked")] == [one] + [two] * 7
        gate.touch()
        assert [len((await task).completions) for task in asking] == [8] + [1] * 7


async def test_one_that_fails_for_good_leaves_and_when_all_have_requests_fail_with_its_error(tmp_path, model):
    never_again = ",".join(f"dies-at-start@{life}" for life in (2, 3, 4))
    events = []
    async with served(tmp_path, model, server=TWO, fault=never_again) as server:
        client = await server.client("run", on_event=events.append)
        await kill(client, 1)
        await until(
            lambda: any(isinstance(e, p.EngineDied) and e.for_good for e in events), "the engine to be given up"
        )
        assert (await publish(client, model, 1)).version == 1
        assert (await client.ask(generate(PROMPT))).version == 1
        pulse = await client.ask(p.Ping())
        assert (pulse.engine, pulse.engines, pulse.restarts) == ("ready", 1, 3)
        assert "1 of 2 go on" in (server.run_dir / "server.log").read_text()
        await kill(client, 0)
        with pytest.raises(EngineFailed, match="3 times in a row"):
            await client.ask(generate(PROMPT, deadline_s=200))
        assert (await client.ask(p.Ping())).engine == "failed"


async def test_an_engine_that_does_not_come_up_at_first_ends_the_whole_launch(tmp_path, model):
    async with served(tmp_path, model, server=TWO, fault="dies-at-start@1#1", wait=False) as server:
        assert await server.exited() == 1
        failure = (server.run_dir / "server_failure.json").read_text()
        assert "does not like this model" in failure
        assert "engine-1.log" in failure


async def test_an_engine_that_alone_refuses_a_version_is_replaced_and_loads_it(tmp_path, model):
    async with served(tmp_path, model, server=TWO, fault="load-500@1#1") as server:
        client = await server.client("run")
        assert (await publish(client, model, 1)).version == 1
        await serving(client, 2)
        assert (await client.ask(p.Status())).restarts == 1
        assert loads_of(server, (await pids(client))[1]) == ["policy-v000001"]


async def test_a_version_that_both_refuse_is_refused_and_the_old_one_serves_on(tmp_path, model):
    async with served(tmp_path, model, server=TWO, fault="load-500") as server:
        client = await server.client("run")
        with pytest.raises(Exception, match="not to my taste"):
            await publish(client, model, 1)
        assert (await client.ask(generate(PROMPT))).version == 0
        assert (await client.ask(p.Status())).restarts == 0


async def test_each_engine_has_folders_a_log_and_gpus_of_its_own(tmp_path, model):
    gpus = {"CUDA_VISIBLE_DEVICES": "3,GPU-a,1,0,5"}
    wanted = {**TWO, "tensor_parallel": 2, "device": "cuda"}
    async with served(tmp_path, model, server=wanted, environment=gpus) as server:
        starts = [entry["environment"] for entry in server.journal("start")]
        assert {start["CUDA_VISIBLE_DEVICES"] for start in starts} == {"3,GPU-a", "1,0"}
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            assert len({start[name] for start in starts}) == 2
        for name in ("engine.log", "engine-1.log"):
            assert "--- life 1" in (server.run_dir / name).read_text()


async def test_too_few_gpus_are_an_error_before_anything_starts(tmp_path, model):
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,2"}
    wanted = {**TWO, "tensor_parallel": 2, "device": "cuda"}
    async with served(tmp_path, model, server=wanted, environment=gpus, wait=False) as server:
        assert await server.exited() == 2
        assert "need 4, and 3 are visible (0, 1, 2)" in (server.run_dir / "output.log").read_text()
        assert not server.journal("start")


async def test_both_sleep_and_wake_and_one_that_dies_meanwhile_comes_back_for_the_next_version(tmp_path, model):
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1"}
    wanted = {**TWO, "device": "cuda", "sleep": True}
    gate = tmp_path / "gate"
    gate.touch()
    async with served(tmp_path, model, server=wanted, environment=gpus, fault=f"holds:{gate}") as server:
        client = await server.client("run")
        await client.ask(p.Sleep())
        assert {entry["pid"] for entry in server.journal("sleep")} == set(await pids(client))
        waiting = asyncio.create_task(client.ask(generate(PROMPT, min_version=1, deadline_s=200)))
        await kill(client, 1)
        await serving(client, 1)
        await publish(client, model, 1)
        await serving(client, 2)
        assert len(server.journal("sleep")) == 3  # As it came back, it was brought to what the other one is.
        assert not waiting.done()
        await client.ask(p.Wake())
        assert (await waiting).version == 1
        gate.unlink()
        asking = [asyncio.create_task(client.ask(generate(PROMPT))) for _ in range(10)]
        await until(lambda: len(server.journal("asked")) == 11, "all of them to be in flight")
        gate.touch()
        await asyncio.gather(*asking)
        assert {entry["pid"] for entry in server.journal("asked")} == set(await pids(client))
        assert not server.journal("generated-asleep")


async def test_people_see_the_figures_of_both_and_are_answered_by_either(tmp_path, model):
    http = ("--http", "127.0.0.1:0")
    async with served(tmp_path, model, server=TWO, fault="slow-start:60@2", arguments=http) as server:
        client = await server.client()
        await client.ask(generate(PROMPT))
        async with aiohttp.ClientSession(client.welcome.http_url) as http:
            for ready in (2, 1):
                async with http.get("/metrics") as answer:
                    text = await answer.text()
                for engine in range(2):
                    assert f'tandem_engine_ready{{engine="{engine}"}} {float(engine < ready)}\n' in text
                for engine in range(ready):
                    assert f'_tokens_total{{engine="{engine}"' in text
                async with http.get("/v1/models") as answer:
                    assert answer.status == 200
                if ready == 2:
                    await kill(client, 1)
                    await serving(client, 1)
