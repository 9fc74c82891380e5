"""What several engines of one server share out or put together: GPUs, slots, figures, their end."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import ConfigError, EngineFailed, PeerDied, Refused
from bridge.protocol import PublishAdapter
from served import until
from server_env.adapters.versions import AdapterLimits, Adapters
from server_env.config import ServerConfig
from server_env.engines.engine import EngineGone
from server_env.gpus import shares, visible
from server_env.supervision.replicas import Replicas
from server_env.supervision.slots import Slots


@pytest.mark.parametrize(
    ("value", "expected"), [("0,1", ["0", "1"]), ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]), ("", []), ("2,-1,3", ["2"])]
)
def test_what_is_visible_is_what_cuda_takes_the_variable_to_mean(value, expected):
    assert visible({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_without_the_variable_all_gpus_of_the_driver_are_visible(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)'; echo '  MIG 1g'; echo 'GPU 1: X (UUID: GPU-b)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible({}) == ["0", "1"]


def test_gpus_are_dealt_out_in_their_order_and_none_twice():
    server = ServerConfig(data_parallel=2)
    found = shares(server, "cuda", 2, {"CUDA_VISIBLE_DEVICES": "3,1,GPU-a,0,7"})
    assert [share["CUDA_VISIBLE_DEVICES"] for share in found] == ["3,1", "GPU-a,0"]


def test_a_single_engine_and_engines_without_gpus_see_what_the_server_sees():
    assert shares(ServerConfig(), "cuda", 4, {"CUDA_VISIBLE_DEVICES": ""}) == [{}]
    assert shares(ServerConfig(data_parallel=3), "cpu", 1, {}) == [{}, {}, {}]


def test_gpus_that_would_be_the_same_for_all_engines_are_refused():
    server = ServerConfig(data_parallel=2, engine_env={"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match=r"server\.engine_env: CUDA_VISIBLE_DEVICES"):
        shares(server, "cuda", 1, {})


def test_a_slot_is_an_adapters_and_the_base_model_needs_none():
    freed = []
    slots = Slots(1, lambda: freed.append(True))
    with slots.taken("a"), slots.taken(""):
        with slots.taken("a"):
            assert [slots.room_for(name) for name in ("a", "b", "")] == [True, False, True]
        assert not freed
    assert freed == [True]
    assert slots.room_for("b")


class Process:
    """An engine that never answers, and its process: what is asked is lost once it is stopped."""

    name = "engine"

    def __init__(self):
        self.lives, self.closed = 0, asyncio.Event()
        self.engine = SimpleNamespace(adapter_slots=2, load_adapter=self.until_closed, unload_adapter=self.until_closed)

    async def until_closed(self, *_):
        await self.closed.wait()
        raise EngineGone("closed")

    async def start(self, _timeout_s):
        self.lives += 1
        return SimpleNamespace()

    async def wait(self):
        await asyncio.Event().wait()

    async def stop(self):
        self.closed.set()

    def failure(self, what):
        return EngineFailed(what)


@pytest.fixture
async def replicas():
    observer: Any = SimpleNamespace(engine_died=lambda *_, **__: None)
    processes: list[Any] = [Process(), Process()]
    replicas = Replicas(processes, observer, ServerConfig())
    await replicas.start()
    return replicas


async def a_moment():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_an_ending_server_has_not_answered_another_one_can(replicas):
    """Although one engine has failed for good before: that is why none of it is left, and not why the server ends."""
    replicas._all[0].supervisor._give_up(EngineFailed("3 times in a row"))
    asking = asyncio.create_task(replicas.call(lambda _: replicas._all[1].supervisor._process.until_closed()))
    await a_moment()
    await replicas.stop()
    with pytest.raises(PeerDied, match="ended before it had answered"):
        await asking


async def test_who_waits_for_a_version_is_not_told_that_it_was_refused_when_the_server_ends(replicas, monkeypatch):
    parts: list[Any] = [replicas, SimpleNamespace(delete=lambda _: None), None, AdapterLimits(8, 2, 4)]
    adapters = Adapters(*parts)
    loaded = SimpleNamespace(name="policy-v000001", path=None, digest="d", config={}, users=0)
    monkeypatch.setattr(adapters, "_spool", lambda *_: loaded)

    async def leased():
        async with adapters.lease(-1, 1):
            pass

    waiting = asyncio.create_task(leased())
    request = PublishAdapter(version=1, digest="d", adapter_config={})
    publishing = asyncio.create_task(adapters.publish(request, None))
    await until(lambda: replicas._all[0].supervisor._open, "the adapter to be on its way into the engines")
    await replicas.stop()
    with pytest.raises(PeerDied):
        await publishing
    assert not waiting.done()
    waiting.cancel()
    await adapters.close()


async def test_who_waits_for_a_version_is_told_that_it_was_refused(replicas, monkeypatch):
    parts: list[Any] = [replicas, SimpleNamespace(), None, AdapterLimits(8, 2, 4)]
    adapters = Adapters(*parts)

    def refuse(*_):
        raise Refused("no such tensor")

    monkeypatch.setattr(adapters, "_spool", refuse)
    with pytest.raises(Refused, match="no such tensor"):
        await adapters.publish(PublishAdapter(version=1, digest="d", adapter_config={}), None)
    with pytest.raises(Refused, match="was refused: no such tensor"):
        await adapters._wait_for(1)
    await replicas.stop()


async def test_a_start_that_is_cancelled_lets_every_engine_end_in_peace():
    class Stubborn(Process):
        """Cancelled while it starts, it takes so many moments to end its process."""

        def __init__(self, moments):
            super().__init__()
            self.moments, self.ended = moments, False

        async def start(self, timeout_s):
            try:
                await asyncio.Event().wait()
            finally:
                for _ in range(self.moments):
                    await a_moment()
                self.ended = True
            return await super().start(timeout_s)

    parts: list[Any] = [[Stubborn(1), Stubborn(2)], SimpleNamespace(), ServerConfig()]
    starting = asyncio.create_task(Replicas(*parts).start())
    await a_moment()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [process.ended for process in parts[0]] == [True, True]
