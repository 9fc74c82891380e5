"""tandem-server through the real bridge client, in front of the fake engine: what a trainer relies on."""

import asyncio
from pathlib import Path

import pytest

import lora_files
from bridge import protocol as p
from bridge.errors import Refused, StaleVersion
from served import generate, publish, score, served, until

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]


async def scored(client, version=-1):
    return p.unpack_logprobs((await client.ask(score(PROMPT, version=version))).logprobs)


async def test_completions_come_as_token_ids_with_one_logprob_each(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client()
        answer = await client.ask(generate(PROMPT, n=3, max_tokens=6, ignore_eos=True))
    assert answer.version == 0
    assert len(answer.completions) == 3
    for completion in answer.completions:
        assert len(p.unpack_ids(completion.token_ids)) == len(p.unpack_logprobs(completion.logprobs)) == 6
        assert all(logprob < 0 for logprob in p.unpack_logprobs(completion.logprobs))
        assert completion.finish_reason == "length"


async def test_the_welcome_says_what_the_engine_can_do(tmp_path, model, backend):
    async with served(tmp_path, model) as server:
        welcome = (await server.client("run")).welcome
    assert (welcome.engine, welcome.engine_version, welcome.version) == (backend, "0.0.fake", 0)
    assert welcome.capabilities == ("lora", "score")
    assert welcome.limits == p.Limits(
        max_context=512, max_lora_rank=8, adapter_slots=3, max_in_flight=4096, vocab_size=512
    )
    assert welcome.log_path == str(server.run_dir / "server.log")


async def test_a_published_version_serves_new_requests_and_a_pinned_one_stays_what_it_was(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        base = await scored(client)
        loaded = await publish(client, model, 1)
        first = await scored(client)
        await publish(client, model, 2)
        assert loaded.name == "policy-v000001"
        assert (await client.ask(generate(PROMPT))).version == 2
        assert await scored(client, 0) == base
        assert await scored(client, 1) == first
        assert len({tuple(base), tuple(first), tuple(await scored(client))}) == 3


async def test_a_request_for_a_version_to_come_waits_for_it(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        waiting = asyncio.create_task(client.ask(generate(PROMPT, min_version=3)))
        await publish(client, model, 1)
        assert not waiting.done()
        await publish(client, model, 3)
        assert (await waiting).version == 3


async def test_a_request_that_waits_for_a_refused_version_fails_at_once(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        waiting = [asyncio.create_task(client.ask(generate(PROMPT, min_version=v, deadline_s=600))) for v in (4, 5, 6)]
        await client.ask(p.Ping())
        with pytest.raises(Refused, match="rank 16"):
            await publish(client, model, 5, rank=16)
        for task in waiting[:2]:
            with pytest.raises(StaleVersion, match="rank 16"):
                await task
        assert not waiting[2].done()
        with pytest.raises(StaleVersion, match="rank 16"):  # So does one that comes late.
            await client.ask(generate(PROMPT, min_version=5, deadline_s=600))
        await publish(client, model, 6)
        assert (await waiting[2]).version == 6


async def test_versions_rise_and_a_repeated_publish_is_one_publish(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        first = await publish(client, model, 5)
        assert await publish(client, model, 5) == first
        with pytest.raises(StaleVersion, match="version 4 came after version 5"):
            await publish(client, model, 4)
        with pytest.raises(StaleVersion):
            await publish(client, model, 5, seed=77)
        assert len(server.journal("load")) == 1


async def test_the_same_bytes_under_a_new_version_are_an_alias(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        await publish(client, model, 1, seed=9)
        loaded = await publish(client, model, 2, seed=9)
        assert (loaded.alias_of, loaded.name) == (1, "policy-v000001")
        assert (await client.ask(generate(PROMPT))).version == 2
        assert len(server.journal("load")) == 1
        for version in (3, 4, 5):
            await publish(client, model, version)
        await until(lambda: len(server.journal("unload")) == 2, "two adapters to be unloaded")


async def test_what_is_in_flight_keeps_its_version_while_newer_ones_come(tmp_path, model):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, fault=f"holds:{gate}") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        old = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        for version in (2, 3, 4, 5):
            await publish(client, model, version)
        status = await client.ask(p.Status())
        assert status.in_use == {1: 1}
        assert status.loaded == (4, 5)
        unloaded = {entry["name"] for entry in server.journal("unload")}
        assert "policy-v000001" not in unloaded
        gate.touch()
        assert (await old).version == 1
        await until(
            lambda: "policy-v000001" in {e["name"] for e in server.journal("unload")}, "version 1 to be unloaded"
        )


async def test_no_more_adapters_are_in_flight_at_once_than_the_engine_has_slots_for(tmp_path, model):
    """Three, here. The base model has a slot of its own, and a fourth adapter waits for one of theirs."""
    gate = tmp_path / "gate"
    async with served(tmp_path, model, fault=f"holds:{gate}") as server:
        client = await server.client("run")
        asking = [asyncio.create_task(client.ask(generate(PROMPT, version=0)))]
        for version in range(1, 6):
            await publish(client, model, version)
            asking += [asyncio.create_task(client.ask(generate(PROMPT, version=version))) for _ in range(2)]
            held = 1 + 2 * min(version, 3)
            await until(lambda held=held: len(server.journal("asked")) == held, f"{held} requests at the engine")
        await client.ask(p.Ping())
        assert len(server.journal("asked")) == 7
        gate.touch()
        assert sorted([(await task).version for task in asking]) == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


async def test_two_hundred_publishes_leave_one_load_each_and_few_files(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        for version in range(1, 201):
            await publish(client, model, version, rank=1, targets=("q_proj",))
        assert (await client.ask(generate(PROMPT))).version == 200
        loads = [entry["name"] for entry in server.journal("load")]
        assert len(loads) == len(set(loads)) == 200
        await until(lambda: len(server.journal("unload")) == 198, "all but two versions to be unloaded")
        spool = Path(server.journal("load")[-1]["path"]).parent
        await until(lambda: len(list(spool.iterdir())) <= 4, "the files of the others to be gone")


async def test_a_retired_version_is_refused_by_name(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        for version in (1, 2, 3):
            await publish(client, model, version)
        with pytest.raises(StaleVersion, match="version 1 is no longer served"):
            await scored(client, 1)


REFUSED = [
    ({"rank": 16}, "rank 16 is above the server's limit of 8"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "all"}, "bias"),
    ({"peft_type": "IA3"}, "IA3"),
    ({"rank_pattern": {"q_proj": 32}}, "rank 32"),
]


async def test_what_the_server_cannot_represent_is_refused_by_name(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        await publish(client, model, 1)
        for changes, named in REFUSED:
            with pytest.raises(Refused, match=named):
                await publish(client, model, 2, **changes)
            assert (await client.ask(generate(PROMPT))).version == 1
        await publish(client, model, 2)


async def test_corrupt_bytes_are_refused_and_the_old_version_serves_on(tmp_path, model):
    adapter = lora_files.make(model, 1)
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        changed = bytearray(adapter.data)
        changed[-1] ^= 1
        with pytest.raises(Refused, match="digest"):
            await client.ask(adapter.publish(1), bytes(changed))
        with pytest.raises(Refused, match="safetensors"):
            await client.ask(adapter.publish(1), b"")
        assert (await client.ask(generate(PROMPT))).version == 0
        assert not server.journal("load")


async def test_a_bad_request_is_refused_and_the_next_one_answered(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client()
        for bad in (
            generate([]),
            generate(PROMPT, n=0),
            generate(PROMPT, max_tokens=0),
            generate([5] * 600),
            generate([9000]),
            p.Generate(prompt=b"abc"),
            score([5]),
        ):
            with pytest.raises(Refused):
                await client.ask(bad)
        assert (await client.ask(generate(PROMPT))).completions


async def test_a_cancelled_request_is_aborted_at_the_engine(tmp_path, model):
    async with served(tmp_path, model, fault="hangs") as server:
        client = await server.client()
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        asking.cancel()
        await until(lambda: server.journal("aborted"), "the engine to hear of it")
        assert (await client.ask(p.Status())).in_use == {}


async def test_a_request_past_its_deadline_is_aborted_at_the_engine(tmp_path, model):
    async with served(tmp_path, model, fault="hangs") as server:
        client = await server.client()
        for deadline_s in (0.5, 2, 8, 32):  # It may pass before the engine is asked.
            with pytest.raises(TimeoutError):
                await client.ask(generate(PROMPT, deadline_s=deadline_s))
            if server.journal("asked"):
                break
        await until(lambda: server.journal("aborted"), "the engine to hear of it")


async def test_many_groups_at_once_are_each_answered(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client()
        answers = await asyncio.gather(
            *(client.ask(generate([5 + i % 300, 6], n=2, max_tokens=1, deadline_s=300)) for i in range(1500))
        )
        assert sum(len(answer.completions) for answer in answers) == 3000
        status = await client.ask(p.Status())
        assert (status.requests, status.generated_tokens, status.restarts) == (1500, 3000, 0)
