"""One engine's proof after a wake: beside its first requests, which are answered when it is over."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import EngineFailed
from server_env.engines.engine import EngineGone
from server_env.supervision import supervisor
from server_env.supervision.replica import PROOF_TRIES, Replica


class Engine:
    adapter_slots = 2

    async def sleep(self):
        pass

    async def wake(self):
        pass

    async def wake_weights(self):
        pass

    async def probe(self):
        return SimpleNamespace()

    async def progress(self):
        return 0.0


class Process:
    """An engine's process that never ends by itself."""

    def __init__(self):
        self.engine, self.lives, self.name, self.stops = Engine(), 1, "engine", 0

    async def start(self, _timeout_s):
        return SimpleNamespace()

    async def wait(self):
        await asyncio.Event().wait()

    async def stop(self):
        self.stops += 1

    def failure(self, what):
        return EngineFailed(what)


class Group:
    """What the others are like. outcomes: of the proofs of a wake, one after the other; then they succeed."""

    level = "awake"

    def __init__(self, *outcomes):
        self.outcomes, self.proofs, self.may_go_on = list(outcomes), [], asyncio.Event()

    async def prove(self, _engine, /, *, alone):
        self.proofs.append(alone)
        if not alone:
            await self.may_go_on.wait()
            if self.outcomes:
                raise self.outcomes.pop(0)

    def live_adapters(self):
        return {}

    def changed(self):
        pass

    def died(self, error):
        pass

    def restarted(self, seconds):
        pass

    def given_up(self, error):
        pass


@pytest.fixture
def woken(monkeypatch):
    """An engine that has just woken, and its parts."""
    monkeypatch.setattr(supervisor, "LAST_BREATH_S", 0.01)

    async def woken(*outcomes):
        process, group = Process(), Group(*outcomes)
        parts: list[Any] = [
            process,
            group,
            SimpleNamespace(startup_timeout_s=5, stall_timeout_s=50, load_timeout_s=5),
        ]
        replica = Replica(*parts)
        await replica.supervisor.start()
        await replica.turn("asleep")
        await replica.turn("awake")
        return replica, group, process

    return woken


async def answered(_engine):
    return "answer"


async def test_it_is_asked_at_once_and_answers_when_it_is_proven(woken):
    replica, group, _ = await woken()
    asked = asyncio.create_task(replica.ask(answered, "", 1))
    await asyncio.sleep(0.02)
    assert not asked.done()
    group.may_go_on.set()
    assert await asked == "answer"
    assert group.proofs == [True, False]  # As it started, and as it woke.
    assert await replica.ask(answered, "", 1) == "answer"


async def test_a_request_that_is_given_up_does_not_end_the_proof(woken):
    replica, group, _ = await woken()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await replica.ask(answered, "", 1)
    group.may_go_on.set()
    assert await replica.ask(answered, "", 1) == "answer"
    assert len(group.proofs) == 2


async def test_sleep_waits_for_the_proof(woken):
    replica, group, _ = await woken()
    sleeping = asyncio.create_task(replica.turn("asleep"))
    await asyncio.sleep(0.02)
    assert replica.level == "awake"
    group.may_go_on.set()
    await sleeping
    assert replica.level == "asleep"


async def test_a_proof_that_loses_a_request_is_made_again(woken):
    replica, group, process = await woken(EngineGone("a dropped connection"))
    group.may_go_on.set()
    assert await replica.ask(answered, "", 1) == "answer"
    assert len(group.proofs) == 3
    assert process.stops == 0


@pytest.mark.parametrize(
    "outcomes",
    [
        [EngineGone("a dropped connection")] * PROOF_TRIES,
        [EngineFailed("logprobs under the canary are 3 away")],
        [ValueError("an answer that nobody can read")],
    ],
    ids=["always lost", "other answers", "something else"],
)
async def test_an_engine_that_cannot_be_proven_is_replaced_and_answers_nobody(woken, outcomes):
    replica, group, process = await woken(*outcomes)
    group.may_go_on.set()
    with pytest.raises(EngineGone):
        await replica.ask(answered, "", 1)
    assert process.stops == 1
    assert len(group.proofs) == 1 + len(outcomes)
