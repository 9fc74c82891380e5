"""An engine that dies in the trainer's turn is started again when it is needed, and nobody waits for it before."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import EngineFailed
from server_env.config import ServerConfig
from server_env.engines.engine import EngineGone
from server_env.supervision.replicas import Replicas


class Process:
    """An engine and its process, which ends when `died` is set. starts: how many lives were begun."""

    name, pid = "engine", 1

    def __init__(self):
        self.starts, self.fails, self.dies_of_sleep, self.loaded = 0, False, False, []
        self.may_start, self.died = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.engine: Any = SimpleNamespace(
            adapter_slots=2, sleep=self.sleep, wake_weights=self.turn, wake=self.turn, probe=self.turn, close=self.turn
        )
        self.engine.load_adapter = self.load

    @property
    def lives(self):
        return self.starts

    async def turn(self):
        pass

    async def sleep(self):
        if self.dies_of_sleep:
            self.died.set()
            raise EngineGone("it is dying")

    async def load(self, name, _path):
        self.loaded.append(name)

    async def start(self, _timeout_s):
        self.starts += 1
        await self.may_start.wait()
        if self.fails:
            raise EngineFailed("no memory")
        self.died = asyncio.Event()
        return SimpleNamespace()

    async def wait(self):
        await self.died.wait()
        return 1

    async def stop(self):
        pass

    def failure(self, what, _remedy=""):
        return EngineFailed(what)


class Observer:
    def __init__(self):
        self.back = []

    def engine_died(self, error, *, for_good):
        pass

    def engine_restarted(self, seconds):
        self.back.append(seconds)


@pytest.fixture
async def process():
    return Process()


@pytest.fixture
async def observer():
    return Observer()


@pytest.fixture
async def replicas(process, observer):
    replicas = Replicas([process], observer, ServerConfig())
    await replicas.start()
    yield replicas
    async with asyncio.timeout(60):
        await replicas.stop()


async def a_moment():
    for _ in range(50):
        await asyncio.sleep(0)


async def dead_in_its_sleep(replicas, process):
    await replicas.turn("asleep")
    process.died.set()
    await a_moment()
    assert process.starts == 1
    assert replicas.state == "restarting"


@pytest.mark.parametrize("level", ["awake", "weights"])
async def test_it_stays_away_until_it_is_to_wake_or_to_load(replicas, process, observer, level):
    await dead_in_its_sleep(replicas, process)
    async with asyncio.timeout(60):
        await replicas.turn(level)
    assert (process.starts, replicas.restarts, replicas.state) == (2, 1, "ready")
    assert [replica.level for replica in replicas._all] == [level]
    assert len(observer.back) == 1


async def test_without_a_trainer_it_comes_back_at_once_and_sleeps(replicas, process):
    replicas.turns = lambda: False
    await replicas.turn("asleep")
    process.died.set()
    await a_moment()
    assert (process.starts, replicas.state) == (2, "ready")
    assert [replica.level for replica in replicas._all] == ["asleep"]


@pytest.mark.parametrize("how", ["while it falls asleep", "before"])
async def test_going_to_sleep_waits_for_no_engine_that_is_gone(replicas, process, how):
    if how == "before":
        process.died.set()  # Nobody has seen it yet.
    process.dies_of_sleep = True
    async with asyncio.timeout(60):
        await replicas.turn("asleep")
    assert process.starts == 1


async def test_going_to_sleep_waits_for_an_engine_that_is_starting(replicas, process):
    process.may_start.clear()
    process.died.set()
    await a_moment()
    assert process.starts == 2
    sleeping = asyncio.create_task(replicas.turn("asleep"))
    await a_moment()
    assert not sleeping.done()
    process.may_start.set()
    async with asyncio.timeout(60):
        await sleeping
    assert [replica.level for replica in replicas._all] == ["asleep"]


async def test_what_does_not_start_is_tried_again_in_the_servers_turn_only(replicas, process):
    process.may_start.clear()
    process.fails = True
    process.died.set()
    await a_moment()
    sleeping = asyncio.create_task(replicas.turn("asleep"))
    await a_moment()
    process.may_start.set()
    async with asyncio.timeout(60):
        await sleeping
    await a_moment()
    assert (process.starts, replicas.state) == (2, "restarting")
    process.fails = False
    async with asyncio.timeout(60):
        await replicas.turn("awake")
    assert replicas.state == "ready"


async def test_one_that_cannot_be_started_for_its_turn_is_given_up(replicas, process):
    await dead_in_its_sleep(replicas, process)
    process.fails = True
    with pytest.raises(EngineFailed, match="3 times in a row"):
        async with asyncio.timeout(60):
            await replicas.turn("awake")


async def test_time_passes_while_it_rests_and_stands_still_while_it_is_started(replicas, process):
    await dead_in_its_sleep(replicas, process)
    with pytest.raises(TimeoutError):
        async with replicas.serving_time.timeout(0.01):
            await asyncio.Event().wait()
    process.may_start.clear()
    async with replicas.serving_time.timeout(60) as limit:
        waking = asyncio.create_task(replicas.turn("awake"))
        await a_moment()
        assert limit.when() is None
        process.may_start.set()
        await asyncio.wait([waking])
    assert replicas.state == "ready"


async def test_the_time_in_which_nobody_needed_it_is_not_one_without_it(replicas, process, observer):
    await dead_in_its_sleep(replicas, process)
    replicas._all[0].supervisor._missed_since -= 1000
    async with asyncio.timeout(60):
        await replicas.turn("awake")
    assert observer.back[0] < 1000


async def test_an_adapter_that_comes_meanwhile_is_loaded_when_it_is_back(replicas, process):
    await dead_in_its_sleep(replicas, process)
    async with asyncio.timeout(60):
        await replicas.load_adapter("one", "folder")
    replicas.live_adapters = lambda: {"one": "folder"}
    assert process.loaded == []
    async with asyncio.timeout(60):
        await replicas.turn("awake")
    assert process.loaded == ["one"]
