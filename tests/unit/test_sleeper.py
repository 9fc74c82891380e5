"""Sleep and wake that somebody gives up half-way: the engine is where the server takes it to be, and answers."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import EngineFailed
from server_env.config import ServerConfig
from server_env.gpus import sleeping
from server_env.gpus.sleeping import Sleeper
from server_env.supervision.replicas import Replicas


class Engine:
    """It goes on with a turn whose request is given up. held: the calls that wait, and for what."""

    name, adapter_slots = "engine", 2

    def __init__(self):
        self.awake, self.turns, self.held = True, [], {}
        self._turning = set()

    def hold(self, name):
        self.held[name] = asyncio.Event()
        return self.held[name]

    async def _turn(self, name, *, awake):
        if name in self.held:
            await self.held[name].wait()
        self.turns.append(name)
        self.awake = awake

    async def _asked(self, name, *, awake):
        task = asyncio.create_task(self._turn(name, awake=awake))
        self._turning.add(task)
        await asyncio.shield(task)

    async def sleep(self):
        assert self.awake
        await self._asked("sleep", awake=False)

    async def wake_weights(self):
        await self._asked("wake_weights", awake=False)

    async def wake(self):
        assert not self.awake
        await self._asked("wake", awake=True)

    async def probe(self):
        return SimpleNamespace(capabilities={"sleep"})

    async def progress(self):
        return 0.0

    async def close(self):
        pass


class Process:
    """An engine's process that never ends by itself."""

    pid, lives, name = 1, 1, "engine"

    def __init__(self, engine):
        self.engine = engine

    async def start(self, _timeout_s):
        return await self.engine.probe()

    async def wait(self):
        await asyncio.Event().wait()

    async def stop(self):
        pass

    def failure(self, what):
        return EngineFailed(what)


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
async def sleeper(engine, monkeypatch):
    monkeypatch.setattr(sleeping, "used_bytes", lambda: 0)
    parts: list[Any] = [[Process(engine)], SimpleNamespace(), ServerConfig()]
    replicas = Replicas(*parts)
    await replicas.start()
    yield Sleeper(replicas)
    await replicas.stop()


async def a_moment():
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("name", ["sleep", "wake_weights", "wake"])
async def test_a_turn_that_is_given_up_half_way_leaves_an_engine_that_answers(sleeper, engine, name, times):
    """times: it is cancelled: by its deadline, say, and then by its client."""
    turn = sleeper.sleep if name == "sleep" else sleeper.wake
    if name != "sleep":
        await sleeper.sleep()
    held = engine.hold(name)
    turning = asyncio.create_task(turn())
    await a_moment()
    for _ in range(times):
        turning.cancel()
        await a_moment()
    assert sleeper.asleep  # Nobody asks an engine that is between the two.
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await turning
    await sleeper.wake()
    assert engine.awake
    assert not sleeper.asleep
    await sleeper.sleep()
    assert not engine.awake


async def test_waking_a_sleep_that_was_given_up_is_not_given_up_as_well(sleeper, engine):
    falling_asleep, waking = engine.hold("sleep"), engine.hold("wake")
    turning = asyncio.create_task(sleeper.sleep())
    await a_moment()
    turning.cancel()
    falling_asleep.set()
    await a_moment()
    assert engine.turns == ["sleep", "wake_weights"]
    turning.cancel()
    await a_moment()
    assert sleeper.asleep
    assert not turning.done()
    waking.set()
    with pytest.raises(asyncio.CancelledError):
        await turning
    assert engine.awake
    assert not sleeper.asleep


async def test_a_sleep_that_is_given_up_while_requests_are_in_flight_has_asked_nothing_of_the_engine(sleeper, engine):
    async with sleeper.working():
        turning = asyncio.create_task(sleeper.sleep())
        await a_moment()
        turning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turning
        assert not sleeper.asleep
    assert engine.turns == []


async def test_only_the_weights_being_woken_is_waited_for_too(sleeper, engine):
    await sleeper.sleep()
    held = engine.hold("wake_weights")
    turning = asyncio.create_task(sleeper.ready_for_adapters())
    await a_moment()
    turning.cancel()
    await a_moment()
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await turning
    assert engine.turns == ["sleep", "wake_weights"]
    await sleeper.wake()
    assert engine.turns == ["sleep", "wake_weights", "wake"]


async def test_engines_that_woke_for_an_adapter_are_put_to_sleep_again(sleeper, engine):
    await sleeper.sleep()
    await sleeper.ready_for_adapters()
    await sleeper.sleep()
    assert engine.turns == ["sleep", "wake_weights", "wake", "sleep"]
    assert sleeper.asleep
    await sleeper.sleep()
    assert len(engine.turns) == 4
    await sleeper.wake()
    assert engine.awake
    assert not sleeper.asleep


async def test_nobody_asks_engines_that_wake_only_to_sleep_again_unless_that_is_given_up(sleeper, engine):
    await sleeper.sleep()
    await sleeper.ready_for_adapters()
    held = engine.hold("wake")
    turning = asyncio.create_task(sleeper.sleep())
    await a_moment()
    assert sleeper.asleep
    turning.cancel()
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await turning
    assert engine.awake
    assert not sleeper.asleep
