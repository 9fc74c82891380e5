"""The canary that a life of the engine is asked, when that life ends meanwhile."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge import protocol as p
from bridge.errors import EngineFailed
from server_env.adapters.canary import CanaryCheck, Kept
from server_env.engines.engine import EngineGone
from server_env.supervision.supervisor import Supervisor

ROWS = ([1, 2, 3], [4, 5, 6])


class Engine:
    """Its second life loses the first question, and takes until may_end to let go of the others."""

    def __init__(self):
        self.losing, self.may_end, self.unloaded = asyncio.Event(), asyncio.Event(), []

    async def score(self, adapter, row):
        if (adapter, row) == ("", ROWS[0]):
            raise EngineGone("lost")
        try:
            await asyncio.Event().wait()
        finally:
            self.losing.set()
            await self.may_end.wait()

    async def generate(self, *_):
        await asyncio.Event().wait()

    async def load_adapter(self, name, path):
        pass

    async def unload_adapter(self, name):
        self.unloaded.append(name)

    async def progress(self):
        return 0.0


class Process:
    """An engine's process whose first life ends when it is told to."""

    name = "engine"

    def __init__(self, engine):
        self.engine, self.lives, self.over, self.stops = engine, 0, asyncio.Event(), 0

    async def start(self, _timeout_s):
        self.lives += 1
        return SimpleNamespace()

    async def wait(self):
        await (self.over.wait() if self.lives == 1 else asyncio.Event().wait())
        return 1

    async def stop(self):
        self.stops += 1

    def failure(self, what, _remedy=""):
        return EngineFailed(what)


class Observer:
    """Has each life but the first show that it computes what it did."""

    def __init__(self, check):
        self.check, self.lives = check, 0

    async def engine_started(self, engine):
        self.lives += 1
        if self.lives > 1:
            await self.check.require_the_same(engine, alone=True)

    async def engine_needed(self):
        return False

    def engine_died(self, error):
        pass

    engine_restarted = engine_given_up = engine_died

    def engine_changed(self):
        pass


@pytest.fixture
async def engine():
    return Engine()


@pytest.fixture
def check():
    adapters: Any = SimpleNamespace()
    check = CanaryCheck(adapters, 60.0, lambda *_: None)
    answers = p.CanaryScored(base=(), adapted=(), sampled=b"", rescored=b"", load_s=0.0)
    check._kept = Kept(Path("canary-1"), ROWS, answers)
    return check


async def test_a_server_that_ends_just_as_the_canary_is_lost_ends(engine, check):
    parts: list[Any] = [Process(engine), Observer(check)]
    supervisor = Supervisor(*parts, startup_timeout_s=60, stall_timeout_s=600)
    await supervisor.start()
    parts[0].over.set()
    async with asyncio.timeout(20):
        await engine.losing.wait()
        stopping = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0)
        engine.may_end.set()
        await stopping
    assert supervisor.state == "failed"
    assert parts[0].lives == 2  # No further one was started.


async def test_the_error_that_the_engine_had_is_the_checks_and_the_canary_is_unloaded(engine, check):
    engine.may_end.set()
    with pytest.raises(EngineGone, match="lost"):
        await check.require_the_same(engine, alone=True)
    assert len(engine.unloaded) == 1
