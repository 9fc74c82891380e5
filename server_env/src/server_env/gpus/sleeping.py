"""The engines asleep and awake: device memory is given back between rollouts, and nothing runs meanwhile."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from bridge.errors import Refused
from bridge.protocol import Slept
from server_env.gpus.gpu_memory import used_bytes, used_bytes_below
from server_env.supervision.replicas import Replicas
from server_env.tasks import to_its_end

log = logging.getLogger(__name__)


class Sleeper:
    """Lets work through while the engines are awake. Order after sleep: weights, adapters, KV cache.

    An engine that has begun to turn goes on whoever asked for it is gone, so its turn is always waited for.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.in_flight = 0
        self.waiting = 0
        self._replicas = replicas
        self._awake = asyncio.Event()
        self._awake.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turning = asyncio.Lock()

    @property
    def asleep(self) -> bool:
        """Whether requests have to wait for `wake`."""
        return not self._awake.is_set()

    @property
    def possible(self) -> bool:
        """Whether this engine can sleep at all."""
        return self._replicas.facts is not None and "sleep" in self._replicas.facts.capabilities

    async def until_awake(self) -> None:
        """Wait while the engine sleeps."""
        self.waiting += 1
        try:
            await self._awake.wait()
        finally:
            self.waiting -= 1

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Around every request to the engine: waits while it sleeps, and holds sleep off."""
        await self.until_awake()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def sleep(self) -> Slept:
        """Hold new requests, finish those in flight, give memory back. Raises Refused when the engine cannot.

        Engines that have woken for an adapter wake wholly first: an engine gives back all or nothing. Failed or
        cancelled, it leaves the engines awake.
        """
        if not self.possible:
            raise Refused("This engine cannot sleep.", remedy="Set server.sleep = true; it needs a GPU.")
        async with self._turning:
            started = time.monotonic()
            if self.asleep and self._replicas.level == "asleep":
                return Slept(seconds=0.0)
            self._awake.clear()
            try:
                await self._idle.wait()
                await to_its_end(self._replicas.turn("awake"))
                before = used_bytes()
                await to_its_end(self._replicas.turn("asleep"))
                freed = max(0, before - await used_bytes_below(before))
            except BaseException:
                await to_its_end(self._wake_after_all())
                raise
            level = logging.INFO if freed else logging.WARNING
            log.log(level, "the engine sleeps; %.2f GiB are free again", freed / 2**30)
            return Slept(seconds=time.monotonic() - started, freed_bytes=freed)

    async def wake(self) -> Slept:
        """Take memory back and let requests through. Cancelled, it does so all the same."""
        async with self._turning:
            started = time.monotonic()
            if self.asleep:
                await to_its_end(self._wake())
            return Slept(seconds=time.monotonic() - started)

    async def ready_for_adapters(self) -> None:
        """Wake as much of sleeping engines as loading an adapter needs."""
        async with self._turning:
            if self.asleep:
                await to_its_end(self._replicas.turn("weights"))

    async def _wake(self) -> None:
        await self._replicas.turn("awake")
        self._awake.set()
        log.info("the engine is awake")

    async def _wake_after_all(self) -> None:
        """After a sleep that failed: those that sleep all the same are woken. Requests hear why when they cannot be."""
        try:
            await self._wake()
        finally:
            self._awake.set()
