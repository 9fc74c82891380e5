"""When a server ends by itself: its trainer is silent, or none came. That it stood still itself is no sign."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from server_env.config import from_dict
from server_env.service import Service

LEASE_S = 0.3
NOBODY = f"no trainer came within {LEASE_S:g} s, as server.attach_within_s and keep_server_s say"


@pytest.fixture
async def watched():
    """What makes a service whose watch runs; no engine that could sleep."""
    watches = []

    def make(**settings) -> Service:
        file = from_dict({"server": {"model": "model", "lease_s": LEASE_S, **settings}}, "a test")
        service = Service(file, server_uuid="", log_path="")
        service.sleeper = SimpleNamespace(possible=False, asleep=False)  # type: ignore[assignment]
        watches.append(asyncio.create_task(service.watch_lease()))
        return service

    yield make
    for watch in watches:
        watch.cancel()


async def turns(count: int) -> None:
    """What arrived while the loop stood still is heard some turns later."""
    for _ in range(count):
        await asyncio.sleep(0)


async def ended(service: Service) -> str:
    async with asyncio.timeout(100):
        await service.ended.wait()
    return service.why_ended


async def test_a_trainer_that_falls_silent_is_noticed(watched):
    service = watched()
    service.book.attach("run", "elsewhere:1")
    assert "'run' has been silent" in await ended(service)
    assert LEASE_S <= service.book.silent_s < 2 * LEASE_S


async def test_a_server_that_is_not_to_be_kept_ends_and_does_not_doze_first(watched):
    service = watched(lease_s=0.5)  # Its ticks come to exactly that.
    service.sleeper = SimpleNamespace(possible=True, asleep=False)  # type: ignore[assignment]
    service.book.attach("run", "elsewhere:1")
    assert "'run' has been silent" in await ended(service)


async def test_a_server_that_stood_still_hears_the_heartbeats_that_wait_before_it_judges(watched):
    service = watched()
    service.book.attach("run", "elsewhere:1")
    for _ in range(3):
        await asyncio.sleep(0)
        time.sleep(2 * LEASE_S)  # noqa: ASYNC251 (it stands still)
        await turns(3)
        service.book.beat(1)
    assert not service.ended.is_set()
    assert "has been silent" in await ended(service)


async def test_a_trainer_that_is_about_to_come_is_not_missed_by_a_server_that_stood_still(watched):
    service = watched(attach_within_s=LEASE_S)
    await asyncio.sleep(0)
    time.sleep(2 * LEASE_S)  # noqa: ASYNC251 (it stands still)
    await turns(3)
    service.book.attach("run", "elsewhere:1")
    assert "has been silent" in await ended(service)


async def test_a_server_that_nobody_comes_to_ends(watched):
    assert await ended(watched(attach_within_s=LEASE_S)) == NOBODY
