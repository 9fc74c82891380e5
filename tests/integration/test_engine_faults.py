"""An engine that misbehaves in every way that was ever reported: what the trainer sees, and what is left behind."""

import asyncio
import contextlib
import os
import signal

import msgspec
import pytest

import lora_files
from bridge import protocol as p
from bridge.errors import EngineFailed, Failure, PeerDied, Refused, StaleVersion, Timeout
from bridge.guard import processes
from served import PATIENT, generate, program_after, publish, score, served, until
from server_env.engines import sglang_http, vllm_http

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]
NEEDED = {"vllm": vllm_http.NEEDED_ROUTES, "sglang": sglang_http.NEEDED_ROUTES}
LISTENS = {"vllm": "--uds", "sglang": "--port"}


def failure_of(server) -> Failure:
    return msgspec.json.decode((server.run_dir / "server_failure.json").read_bytes(), type=Failure)


# ---- at start -------------------------------------------------------------------------------------------------------


async def test_an_engine_that_dies_at_start_is_reported_at_once_with_its_own_words(tmp_path, model):
    async with served(tmp_path, model, fault="dies-at-start", wait=False) as server:
        assert await server.exited() == 1  # It may take 900 s to start.
        failure = failure_of(server)
        assert failure.code == "engine-failed"
        assert failure.why == "ValueError: the fake engine does not like this model"
        assert "does not like this model" in failure.log_tail
        assert failure.log_path.endswith("engine.log")
        assert "does not like this model" in (server.run_dir / "output.log").read_text()


async def test_an_engine_that_never_answers_ends_at_the_startup_timeout(tmp_path, model):
    limit = {"startup_timeout_s": 3.0}
    async with served(tmp_path, model, fault="never-listens", server=limit, wait=False) as server:
        assert await server.exited() == 1
        assert "not ready after 3 s" in failure_of(server).what


async def test_a_slow_start_is_waited_for(tmp_path, model):
    async with served(tmp_path, model, fault="slow-start:2") as server:
        assert (await (await server.client()).ask(generate(PROMPT))).completions


async def test_a_port_that_is_taken_is_another_try(tmp_path, model):
    async with served(tmp_path, model, fault="port-clash@1") as server:
        assert (await (await server.client()).ask(p.Status())).restarts == 0
        assert len(server.journal("start")) == 2


async def test_ports_that_are_always_taken_are_an_error(tmp_path, model):
    async with served(tmp_path, model, fault="port-clash", wait=False) as server:
        assert await server.exited() == 1
        assert "Address already in use" in failure_of(server).why
        assert len(server.journal("start")) == 3


@pytest.mark.parametrize("number", range(4))
async def test_a_missing_route_is_found_before_training_starts(tmp_path, model, backend, number):
    if number >= len(NEEDED[backend]):
        pytest.skip("this engine is asked for fewer routes")
    route = NEEDED[backend][number]
    async with served(tmp_path, model, fault=f"no-route:{route}", wait=False) as server:
        assert await server.exited() == 1
        assert f"has no route {route}" in failure_of(server).what


async def test_logprobs_of_another_distribution_are_found_before_training_starts(tmp_path, model):
    async with served(tmp_path, model, fault="old-logprobs", wait=False) as server:
        assert await server.exited() == 1
        assert "another distribution" in failure_of(server).what


async def test_a_program_that_does_not_exist_is_an_error(tmp_path, model):
    async with served(tmp_path, model, server={"engine_command": ["/no/such/engine"]}, wait=False) as server:
        assert await server.exited() == 1
        assert "127" in failure_of(server).what


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_during_the_start_leaves_nothing(tmp_path, model, signum):
    async with served(tmp_path, model, fault="never-listens,has-child", wait=False) as server:
        await until(lambda: server.journal("child"), "the engine to start")
        server.note_family()
        server.process.send_signal(signum)
        assert await server.exited() == 0
        await server.gone()


# ---- while it works --------------------------------------------------------------------------------------------------


async def test_a_request_in_flight_when_the_engine_dies_is_answered_by_the_next_one(tmp_path, model):
    events = []
    async with served(tmp_path, model, fault="dies@1") as server:
        client = await server.client("run", on_event=events.append)
        await publish(client, model, 7)
        before = await client.ask(p.Status())
        answers = await asyncio.gather(*(client.ask(generate(PROMPT, n=2)) for _ in range(5)))
        assert {answer.version for answer in answers} == {7}
        status = await client.ask(p.Status())
        assert status.restarts == 1
        assert status.engine_pid != before.engine_pid
        await until(lambda: len(events) >= 3, "events")
        kinds = [type(event) for event in events if not isinstance(event, p.Stats)]
        assert kinds == [p.AdapterLoaded, p.EngineDied, p.EngineRestarted]
        assert events[-1].version == 7 or isinstance(events[-1], p.Stats)


async def test_after_a_restart_every_live_version_is_what_it_was(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        for version in (1, 2, 3):
            await publish(client, model, version)
        before = [await client.ask(score(PROMPT, version=v)) for v in (0, 2, 3)]
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        after = [await client.ask(score(PROMPT, version=v)) for v in (0, 2, 3)]
        assert before == after
        assert (await publish(client, model, 4)).version == 4


async def test_the_time_in_which_an_engine_is_started_again_counts_against_no_deadline(tmp_path, model):
    async with served(tmp_path, model, fault="slow-start:8@2") as server:
        client = await server.client("run")
        await publish(client, model, 1)
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        adapter = lora_files.make(model, 2)
        asking = client.ask(generate(PROMPT, deadline_s=4))
        loaded, answer = await asyncio.gather(client.ask(adapter.publish(2, deadline_s=4.0), adapter.data), asking)
        assert (loaded.version, answer.version) == (2, 1)
        assert (await client.ask(p.Status())).restarts == 1


async def test_an_engine_that_sleeps_may_be_started_again_before_it_wakes(tmp_path, model):
    asleep = {"device": "cuda", "sleep": True}
    async with served(tmp_path, model, fault="slow-start:8@2", server=asleep) as server:
        client = await server.client("run")
        await client.ask(p.Sleep())
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        assert isinstance(await client.ask(p.Wake(deadline_s=4)), p.Slept)
        assert (await client.ask(generate(PROMPT))).completions


@pytest.mark.parametrize("needed", ["to wake", "to load", "no more"])
async def test_an_engine_that_dies_in_the_trainers_turn_is_started_when_it_is_needed(tmp_path, model, needed):
    events, gate = [], tmp_path / "gate"
    asleep = {"device": "cuda", "sleep": True}
    async with served(tmp_path, model, fault=f"starts-when:{gate}@2", server=asleep) as server:
        client = await server.client("run", on_event=events.append)
        await client.ask(p.Sleep())
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        await until(lambda: any(isinstance(event, p.EngineDied) for event in events), "the server to notice")
        async with asyncio.timeout(60):
            with pytest.raises(Timeout, match="did not finish Generate"):  # While one is started deadlines stand still.
                await client.ask(generate(PROMPT, deadline_s=0.5))
        pulse = await client.ask(p.Ping())
        assert (pulse.engines, pulse.restarts) == (0, 0)
        assert isinstance(await client.ask(p.Sleep()), p.Slept)
        assert len(server.journal("start")) == 1
        if needed == "no more":
            return  # It ends as any other server.
        gate.touch()
        if needed == "to load":
            assert (await publish(client, model, 1)).version == 1
        await client.ask(p.Wake())
        assert (await client.ask(generate(PROMPT))).completions
        assert (await client.ask(p.Status())).restarts == 1


async def test_an_engine_sleeps_when_what_was_cancelled_is_gone_from_it(tmp_path, model, backend):
    if backend == "vllm":
        pytest.skip("vLLM ends what runs when it is told to sleep")
    gate = tmp_path / "gate"
    asleep = {"device": "cuda", "sleep": True}
    async with served(tmp_path, model, fault=f"hangs@1,abort-holds:{gate}", server=asleep) as server:
        client = await server.client("run")
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        asking.cancel()
        sleeping = asyncio.create_task(client.ask(p.Sleep()))
        await until(lambda: server.journal("flush") or sleeping.done(), "the engine to be asked whether it is idle")
        assert not server.journal("sleep")
        gate.touch()
        assert isinstance(await sleeping, p.Slept)
        assert server.journal("flush")[-1]["running"] == 0
        assert (await client.ask(p.Status())).restarts == 0


async def test_each_life_listens_somewhere_else(tmp_path, model, backend):
    """What a killed engine held may stay held for a while."""
    async with served(tmp_path, model, fault="dies@1") as server:
        assert (await (await server.client("run")).ask(generate(PROMPT))).completions
        lives = [entry["argv"] for entry in server.journal("start")]
    first, second = (argv[argv.index(LISTENS[backend]) + 1] for argv in lives)
    assert first != second


async def test_an_engine_that_always_dies_is_given_up_within_seconds_with_its_log(tmp_path, model):
    async with served(tmp_path, model, fault="dies") as server:
        client = await server.client("run")
        with pytest.raises(EngineFailed) as caught:
            await client.ask(generate(PROMPT, deadline_s=600))
        assert "3 times in a row" in caught.value.what or "lost 4 times" in caught.value.what
        assert caught.value.log_tail
        assert caught.value.log_path.endswith("engine.log")


async def test_an_engine_that_does_not_come_back_fails_everybody(tmp_path, model):
    async with served(tmp_path, model, fault="dies@1,dies-at-start@2,dies-at-start@3,dies-at-start@4") as server:
        client = await server.client("run")
        asking = [asyncio.create_task(client.ask(generate(PROMPT, deadline_s=600))) for _ in range(3)]
        asking.append(asyncio.create_task(client.ask(generate(PROMPT, min_version=1, deadline_s=600))))
        for task in asking[:3]:
            with pytest.raises(EngineFailed, match="3 times in a row"):
                await task
        assert (await client.ask(p.Ping())).engine == "failed"
        with pytest.raises(EngineFailed, match="3 times in a row"):
            await client.ask(generate(PROMPT))
        with pytest.raises(EngineFailed, match="3 times in a row"):
            await publish(client, model, 1)
        with pytest.raises(StaleVersion, match="3 times in a row"):
            await asking[3]


@pytest.mark.parametrize("fault", ["hangs@1", "freezes@1"])
async def test_an_engine_that_stands_still_is_restarted(tmp_path, model, fault):
    async with served(tmp_path, model, fault=fault, server={"stall_timeout_s": 1.5}) as server:
        client = await server.client("run")
        assert (await client.ask(generate(PROMPT, deadline_s=200))).completions
        assert (await client.ask(p.Status())).restarts >= 1  # What a stall holds up looks like one that stands still.


async def test_an_idle_engine_is_not_taken_for_a_stuck_one(tmp_path, model):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, fault=f"holds:{gate}", server={"stall_timeout_s": 600.0}) as server:
        client = await server.client("run")
        waiting = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        assert (await client.ask(p.Ping())).in_flight == 1
        gate.touch()
        await waiting
        assert (await client.ask(p.Status())).restarts == 0


async def test_a_dropped_connection_is_asked_again_without_a_restart(tmp_path, model):
    async with served(tmp_path, model, fault="drops-connection") as server:
        client = await server.client("run")
        assert (await client.ask(generate(PROMPT, deadline_s=200))).completions
        assert (await client.ask(p.Status())).restarts == 0


async def test_an_inner_fault_of_a_living_engine_is_the_requests_own_error(tmp_path, model):
    async with served(tmp_path, model, fault="answers-500") as server:
        client = await server.client("run")
        with pytest.raises(EngineFailed, match="an inner fault"):
            await client.ask(generate(PROMPT))
        assert (await client.ask(p.Status())).restarts == 0


async def test_an_answer_for_another_model_is_an_error(tmp_path, model, backend):
    if backend == "sglang":
        pytest.skip("SGLang does not say for which adapter it answers")
    async with served(tmp_path, model, fault="other-model") as server:
        client = await server.client("run")
        with pytest.raises(EngineFailed, match="answered for 'other'"):
            await client.ask(generate(PROMPT))


# ---- while it loads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("load-500", "not to my taste"),
        ("load-400", "not to my taste"),
        ("load-hangs", "did not load adapter policy-v000001 within 1 s"),
        ("unlisted", "does not list it"),
    ],
)
async def test_a_load_that_fails_leaves_the_old_version_serving(tmp_path, model, backend, fault, named):
    # Of an adapter that cannot be used vLLM says 500, and SGLang 400.
    refusals = {"vllm": ("load-500", "load-400"), "sglang": ("load-400",)}
    error = Refused if fault in refusals[backend] else EngineFailed
    limits = {"load_timeout_s": 1.0} if fault == "load-hangs" else {}
    async with served(tmp_path, model, fault=fault, server=limits) as server:
        client = await server.client("run")
        waiting = asyncio.create_task(client.ask(generate(PROMPT, min_version=1, deadline_s=600)))
        with pytest.raises(error, match=named):
            await publish(client, model, 1)
        with pytest.raises(StaleVersion, match="was refused"):
            await waiting
        assert (await client.ask(generate(PROMPT))).version == 0


async def test_a_publish_past_its_deadline_fails_those_who_wait_for_it_and_can_be_tried_again(tmp_path, model):
    async with served(tmp_path, model, fault="load-hangs@1") as server:
        client = await server.client("run")
        waiting = asyncio.create_task(client.ask(generate(PROMPT, min_version=1, deadline_s=600)))
        adapter = lora_files.make(model, 1)
        with pytest.raises(TimeoutError):
            await client.ask(adapter.publish(1, deadline_s=1.0), adapter.data)
        with pytest.raises(StaleVersion, match="deadline passed"):
            await waiting
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        assert (await publish(client, model, 1)).version == 1
        assert (await client.ask(generate(PROMPT, min_version=1))).version == 1


async def test_an_engine_that_dies_of_a_load_comes_back_and_loads_it(tmp_path, model):
    async with served(tmp_path, model, fault="load-dies@1") as server:
        client = await server.client("run")
        assert (await publish(client, model, 1)).version == 1
        assert (await client.ask(generate(PROMPT))).version == 1


async def test_an_engine_that_cannot_unload_is_replaced_rather_than_waited_for(tmp_path, model):
    """SGLang loads nothing while it waits for requests that it has miscounted."""
    impatient = program_after("from server_env.supervision import replica\nreplica.UNLOAD_TIMEOUT_S = 1.5")
    async with served(tmp_path, model, fault="unload-hangs@1", program=impatient) as server:
        client = await server.client("run")
        for version in range(1, 5):
            assert (await publish(client, model, version)).version == version
        await until(lambda: len(server.journal("start")) == 2, "the next life of the engine")
        assert (await client.ask(generate(PROMPT, min_version=4, deadline_s=200))).version == 4
        assert (await publish(client, model, 5)).version == 5


# ---- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["has-child", "has-child,ignores-sigterm", "has-child,hangs"])
async def test_sigterm_answers_what_is_in_flight_and_leaves_nothing(tmp_path, model, fault):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, fault=f"{fault},holds:{gate}") as server:
        client = await server.client("run")
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        server.note_family()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(PeerDied):
            await asking
        assert await server.exited() == 0
        assert not server.connection_path.exists()
        await server.gone()


async def test_a_signal_while_the_engine_is_started_again_leaves_nothing(tmp_path, model):
    async with served(tmp_path, model, fault="dies@1,never-listens@2,has-child") as server:
        client = await server.client("run")
        asking = asyncio.create_task(client.ask(generate(PROMPT, deadline_s=600)))
        await until(lambda: len(server.journal("child")) == 2, "the second life")
        server.note_family()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(PeerDied):
            await asking
        assert await server.exited() == 0
        await server.gone()


async def test_a_second_signal_does_not_wait_for_a_stubborn_engine(tmp_path, model):
    async with served(tmp_path, model, fault="ignores-sigterm", program=PATIENT) as server:
        server.note_family()
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: "ending: SIGTERM" in server.log(), "the server to begin its end")
        server.process.send_signal(signal.SIGTERM)
        assert await server.exited() == 0
        await server.gone()


async def test_the_engine_ends_when_its_gateway_is_killed(tmp_path, model):
    async with served(tmp_path, model, fault="has-child") as server:
        server.note_family()
        children = {server.journal("child")[0]["child"]}
        server.process.kill()
        await server.exited()
        await until(lambda: not (server.seen | children) & processes().keys(), "the family to be gone")
        for folder in server.leftovers():
            with contextlib.suppress(FileNotFoundError):  # Another server that starts now sweeps it.
                assert folder.stat().st_mode & 0o777 == 0o700
    async with served(tmp_path, model) as server:
        assert len(server.leftovers()) == 1  # Its own: what the killed one left is swept.


async def test_shutdown_is_answered_and_then_done(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        assert isinstance(await client.ask(p.Shutdown(reason="the test is over")), p.Done)
        assert await server.exited() == 0
        assert "the test is over" in (server.run_dir / "server.log").read_text()
