"""The engine asleep and awake: device memory is given back between rollouts, and nothing runs meanwhile."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from bridge.errors import Refused
from bridge.protocol import Slept
from server_env.engine import Engine
from server_env.gpu_memory import used_bytes
from server_env.supervisor import Supervisor

log = logging.getLogger(__name__)


class Sleeper:
    """Lets work through while the engine is awake. Order after sleep: weights, adapters, KV cache."""

    def __init__(
        self, supervisor: Supervisor, before_serving: Callable[[Engine], Awaitable[None]] | None = None
    ) -> None:
        """before_serving: called with an engine that has woken up, while nobody else asks it anything."""
        self.in_flight = 0
        self._before_serving = before_serving
        self._supervisor = supervisor
        self._awake = asyncio.Event()
        self._awake.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._weights_awake = True
        self._turning = asyncio.Lock()

    @property
    def asleep(self) -> bool:
        """Whether requests have to wait for `wake`."""
        return not self._awake.is_set()

    @property
    def possible(self) -> bool:
        """Whether this engine can sleep at all."""
        return self._supervisor.facts is not None and "sleep" in self._supervisor.facts.capabilities

    async def until_awake(self) -> None:
        """Wait while the engine sleeps."""
        await self._awake.wait()

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Around every request to the engine: waits while it sleeps, and holds sleep off."""
        await self._awake.wait()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def sleep(self) -> Slept:
        """Hold new requests, finish those in flight, give memory back. Raises Refused when the engine cannot."""
        if not self.possible:
            raise Refused("This engine cannot sleep.", remedy="Set server.sleep = true; it needs a GPU.")
        async with self._turning:
            started = time.monotonic()
            if self.asleep:
                return Slept(seconds=0.0)
            self._awake.clear()
            try:
                await self._idle.wait()
                before = await used_bytes()
                await self._supervisor.call(lambda engine: engine.sleep())
            except BaseException:
                self._awake.set()
                raise
            self._weights_awake = False
            freed = max(0, before - await used_bytes())
            log.info("the engine sleeps; %.2f GiB are free again", freed / 2**30)
            return Slept(seconds=time.monotonic() - started, freed_bytes=freed)

    async def wake(self) -> Slept:
        """Take memory back and let requests through."""
        async with self._turning:
            started = time.monotonic()
            if self.asleep:
                await self._supervisor.call(self._wake_up)
                self._awake.set()
                log.info("the engine is awake")
            return Slept(seconds=time.monotonic() - started)

    async def ready_for_adapters(self) -> None:
        """Wake as much of a sleeping engine as loading an adapter needs."""
        async with self._turning:
            await self._wake_weights()

    async def engine_started(self, engine: Engine) -> None:
        """A new engine is awake; while the server is to sleep, so is it."""
        self._weights_awake = True
        if self.asleep:
            await engine.sleep()
            self._weights_awake = False

    async def _wake_up(self, engine: Engine) -> None:
        """All of it: an engine that was started while the server sleeps has its weights asleep again."""
        if not self._weights_awake:
            await engine.wake_weights()
            self._weights_awake = True
        await engine.wake()
        if self._before_serving:
            await self._before_serving(engine)

    async def _wake_weights(self) -> None:
        if not self._weights_awake:
            await self._supervisor.call(lambda engine: engine.wake_weights())
            self._weights_awake = True
