"""The engine that sleeps because no trainer is there is woken by the next one that is."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridge import protocol as p
from bridge.server import Call
from served import until
from server_env.config import from_dict
from server_env.service import Service

CALL = Call(b"", b"", None)


class Sleeper:
    """may_wake: until then a wake waits. wakes: how many were begun."""

    in_flight, possible = 0, True

    def __init__(self):
        self.asleep, self.wakes, self.may_wake, self._turning = False, 0, asyncio.Event(), asyncio.Lock()

    async def sleep(self):
        async with self._turning:
            self.asleep = True
        return p.Slept(seconds=0.0)

    async def wake(self):
        async with self._turning:
            if self.asleep:
                self.wakes += 1
                await self.may_wake.wait()
                self.asleep = False
        return p.Slept(seconds=0.0)


def awake(**settings) -> Any:
    """A server whose engine is awake."""
    service: Any = Service(from_dict({"server": {"model": "m", **settings}}, "test"), server_uuid="u", log_path="")
    service.sleeper = Sleeper()
    service.adapters = SimpleNamespace(newest=0)
    service.replicas = SimpleNamespace(finished=0, state="ready", serving=dict, restarts=0)
    return service


@pytest.fixture
async def service():
    """A server whose engine has dozed off."""
    service = awake()
    await service._doze()
    assert service.sleeper.asleep
    service.book.attach("run", "elsewhere:1")
    return service


def heartbeat(service):
    return asyncio.create_task(service.handle(p.Lease(epoch=1), CALL))


async def a_moment():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_heartbeat_whose_deadline_passes_while_it_wakes_leaves_that_to_the_next(service):
    first = heartbeat(service)
    await a_moment()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    service.sleeper.may_wake.set()
    await heartbeat(service)
    assert not service.sleeper.asleep
    assert service.sleeper.wakes == 2


async def test_a_sleep_that_the_trainer_asked_for_is_not_ended_by_a_late_heartbeat(service):
    first = heartbeat(service)
    await a_moment()
    sleeping = asyncio.create_task(service.handle(p.Sleep(epoch=1), CALL))
    await a_moment()
    late = heartbeat(service)
    await a_moment()
    service.sleeper.may_wake.set()
    await asyncio.gather(first, sleeping, late)
    assert service.sleeper.asleep
    assert service.sleeper.wakes == 1


async def test_an_engine_dozes_only_once_the_dead_trainers_requests_are_answered():
    """A sleep waits for them and holds the turn meanwhile: the next trainer's wake would wait for it as long."""
    service = awake(lease_s=0.2, keep_server_s=600.0)
    service.sleeper.in_flight = 1
    watch = asyncio.create_task(service.watch_lease())
    service.book.attach("run", "elsewhere:1")
    await until(lambda: service.book.silent_s > 2 * service.book.lease_s, "the lease to have run out long ago")
    assert not service.sleeper.asleep
    service.sleeper.in_flight = 0
    await until(lambda: service.sleeper.asleep, "the engine to doze")
    watch.cancel()
