"""What a trainer has asked ends when another one takes its place, and does not hold up the next one's sleep."""

import asyncio
import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bridge import protocol as p
from bridge.server import Call
from served import generate, score, until
from server_env.config import from_dict
from server_env.gpus.sleeping import Sleeper
from server_env.service import Service

CALL = Call(b"", b"", None)
PROMPT = [5, 6]
CANARY = p.Canary(digest="", adapter_config={}, rows=())


class Replicas:
    """An engine that never answers. It can sleep."""

    facts = SimpleNamespace(version="1", max_context=100, capabilities={"sleep"})
    engine = SimpleNamespace(name="engine", model="m", max_lora_rank=8, adapter_slots=2)
    level, state, restarts, restart_s, finished = "awake", "ready", 0, 0.0, 0

    def serving(self):
        return {}

    async def turn(self, level):
        self.level = level

    async def call(self, _work, **_how):
        await asyncio.Event().wait()


class Adapters:
    """The base model alone."""

    newest, base = 0, SimpleNamespace(vocab_size=512)

    def new_epoch(self, *, same_run):
        pass

    @contextlib.asynccontextmanager
    async def lease(self, _version, _min_version):
        yield SimpleNamespace(name="", number=0)


class Canary:
    """As the engine: it never answers."""

    async def answer(self, _request, _data, sleeper):
        async with sleeper.working():
            await asyncio.Event().wait()


@pytest.fixture
def service():
    """A server that is kept when its lease has run out."""
    file = from_dict({"server": {"model": "m", "lease_s": 0.3, "keep_server_s": 600.0}}, "a test")
    service: Any = Service(file, server_uuid="u", log_path="")
    replicas: Any = Replicas()
    service.replicas, service.adapters, service.canary = replicas, Adapters(), Canary()
    service.sleeper = Sleeper(replicas)
    return service


@pytest.fixture
async def watched(service):
    """The same, and it watches its lease."""
    watch = asyncio.create_task(service.watch_lease())
    yield service
    watch.cancel()


def asked(service, request, epoch):
    return asyncio.create_task(service.handle(msgspec.structs.replace(request, epoch=epoch), CALL))


async def attached(service, client):
    return (await service.handle(p.Hello(client=client, run_id="run", alone=True), CALL)).epoch


def died_here():
    """A client that was a process of this host."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return f"{os.uname().nodename}:{process.pid}"


async def test_what_a_trainer_has_asked_ends_when_the_next_one_comes_and_what_others_ask_goes_on(service):
    first = await attached(service, "elsewhere:1")
    abandoned = [asked(service, request, first) for request in (generate(PROMPT), score(PROMPT), CANARY)]
    onlooker = asked(service, generate(PROMPT), 0)
    await until(lambda: service.sleeper.in_flight == 4, "the requests to reach the engine")
    service.book.end()
    second = await attached(service, "elsewhere:2")
    own = asked(service, generate(PROMPT), second)
    await asyncio.wait(abandoned, timeout=60)
    assert all(task.cancelled() for task in abandoned)
    await until(lambda: service.sleeper.in_flight == 2, "the next trainer's own request to reach the engine")
    for task in (onlooker, own):
        assert not task.done()
        task.cancel()
    async with asyncio.timeout(60):
        await asked(service, p.Sleep(), second)


async def test_an_engine_dozes_though_a_trainer_that_was_killed_here_had_asked_it(watched):
    abandoned = asked(watched, generate(PROMPT), await attached(watched, died_here()))
    await until(lambda: watched.sleeper.asleep, "the engine to doze")
    assert abandoned.cancelled()


async def test_a_trainer_that_may_only_stand_still_is_waited_for(watched):
    asked_once = asked(watched, generate(PROMPT), await attached(watched, "elsewhere:1"))
    await until(lambda: watched.book.silent_s > 3 * watched.book.lease_s, "the lease to have run out long ago")
    assert not asked_once.done()
    asked_once.cancel()
