"""Keeps an engine running: notices death and standstill, starts it again, and asks open requests again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeVar

from bridge.errors import BridgeError, EngineFailed, from_failure, to_failure
from server_env.engine import Engine, EngineFacts, EngineGone
from server_env.engine_process import EngineProcess

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["starting", "ready", "restarting", "failed"]

MAX_RESTARTS = 3
"""Restarts without one finished request between them."""

MAX_TRIES = 4
"""Times that one request is asked: it may be what kills the engine."""

LAST_BREATH_S = 5.0
"""How long an engine that dropped a request may take to end before it is asked whether it lives."""

HEALTH_S = 10.0


class Observer(Protocol):
    """Who wants to know what becomes of the engine."""

    async def engine_started(self, engine: Engine) -> None:
        """It answers, and serves nobody yet: make it what the last life was. Raises EngineFailed when that fails."""
        ...

    def engine_died(self, error: EngineFailed) -> None:
        """It is gone."""
        ...

    def engine_restarted(self, seconds: float) -> None:
        """It serves again, after seconds without it."""
        ...


class Supervisor:
    """One engine over all its lives. `call` is how everybody else talks to it."""

    def __init__(
        self, process: EngineProcess, observer: Observer, *, startup_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self.state: State = "starting"
        self.restarts = 0
        self.finished = 0
        self.facts: EngineFacts | None = None
        self._process = process
        self._observer = observer
        self._startup_timeout_s = startup_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._unanswered_restarts = 0
        self._open = 0
        self._error: EngineFailed | None = None
        self._settled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._examination: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        """The engine; only to be used inside `call`."""
        return self._process.engine

    @property
    def pid(self) -> int:
        """The engine's process id, 0 while there is none."""
        return self._process.pid

    @property
    def life(self) -> int:
        """Counts the engine's starts."""
        return self._process.lives

    async def start(self) -> EngineFacts:
        """The first start. Raises EngineFailed: an engine that never came up is not tried again."""
        self.facts = await self._process.start(self._startup_timeout_s)
        await self._observer.engine_started(self.engine)
        self._set("ready")
        self._tasks = [asyncio.create_task(self._keep_alive()), asyncio.create_task(self._watch_for_stall())]
        for task in self._tasks:
            task.add_done_callback(self._watcher_ended)
        return self.facts

    async def stop(self) -> None:
        """End the engine for good; open calls end with EngineFailed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is None:
            self._error = EngineFailed("The server is shutting down.")
        self._set("failed")
        await self._process.stop()

    async def call(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        """The result of work on a living engine, asked again (MAX_TRIES) when it dies. Raises EngineFailed."""
        why = ""
        for _ in range(MAX_TRIES):
            await self._until_ready()
            life = self._process.lives
            self._open += 1
            try:
                result = await work(self.engine)
            except EngineGone as error:
                why = str(error)
                await self._examine(life)
            else:
                self.finished += 1
                self._unanswered_restarts = 0
                return result
            finally:
                self._open -= 1
        raise self._process.failure(f"The engine was lost {MAX_TRIES} times while it worked on this request: {why}")

    async def replace(self, life: int, why: str) -> None:
        """End a life that cannot go on as it is; the next one begins by itself."""
        if not self._over(life):
            log.error("%s: ending the engine", why)
            await self._process.stop()

    async def _until_ready(self) -> None:
        while self.state != "ready":
            if self.state == "failed":
                assert self._error
                raise from_failure(to_failure(self._error))
            await self._settled.wait()

    async def _examine(self, life: int) -> None:
        """A request of this life was dropped: return when that life is known to be over, or to be well after all."""
        if self._over(life):
            return
        if self._examination is None or self._examination.done():
            self._examination = asyncio.create_task(self._end_unless_well(life))
        await asyncio.shield(self._examination)

    async def _end_unless_well(self, life: int) -> None:
        try:
            await asyncio.wait_for(self._process.wait(), LAST_BREATH_S)
        except TimeoutError:
            if await self._is_well() or self._over(life):
                return
            log.warning("the engine dropped a request and does not answer: ending it")
            await self._process.stop()
        if not self._over(life):
            self._set("restarting")  # _keep_alive is about to say the same.

    def _over(self, life: int) -> bool:
        return life != self._process.lives or self.state != "ready"

    async def _is_well(self) -> bool:
        try:
            await asyncio.wait_for(self.engine.probe(), HEALTH_S)
        except (EngineGone, EngineFailed, TimeoutError):
            return False
        return True

    async def _keep_alive(self) -> None:
        """Wait for each life to end, and begin the next."""
        while True:
            code = await self._process.wait()
            ended = time.monotonic()
            error = self._process.failure(f"The engine ended with code {code}.")
            self._set("restarting")
            log.warning("%s %s", error.what, error.why)
            self._observer.engine_died(error)
            await self._process.stop()
            if not await self._restart(error):
                return
            self._set("ready")
            self._observer.engine_restarted(time.monotonic() - ended)

    async def _restart(self, error: EngineFailed) -> bool:
        """The next life, after at most MAX_RESTARTS tries; whether there is one."""
        while self._unanswered_restarts < MAX_RESTARTS:
            self._unanswered_restarts += 1
            self.restarts += 1
            try:
                self.facts = await self._process.start(self._startup_timeout_s)
                await self._observer.engine_started(self.engine)
            except EngineGone:
                error = self._process.failure("The engine died while its adapters were loaded.")
            except BridgeError as failed:
                error = self._process.failure(f"The engine did not start again: {failed.what}")
            else:
                return True
            await self._process.stop()
        self._error = EngineFailed(
            f"The engine failed {MAX_RESTARTS} times in a row without finishing a request. {error.what}",
            why=error.why,
            log_path=error.log_path,
            log_tail=error.log_tail,
            remedy=error.remedy,
        )
        log.error("%s", self._error)
        self._set("failed")
        return False

    async def _watch_for_stall(self) -> None:
        """End an engine that has had work and made no progress for stall_timeout_s; _keep_alive starts the next."""
        seen: float | None = None
        since = time.monotonic()
        while True:
            await asyncio.sleep(self._stall_timeout_s / 8)
            life, now = self._process.lives, await self._progress_or_none()
            if not self._open or self._over(life) or now not in (None, seen):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self._stall_timeout_s:
                await self.replace(life, f"the engine has made no progress for {self._stall_timeout_s:g} s")

    async def _progress_or_none(self) -> float | None:
        if not self._open:
            return None
        try:
            return await asyncio.wait_for(self.engine.progress(), HEALTH_S)
        except (EngineGone, BridgeError, TimeoutError):
            return None

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        """Without its watchers an engine must not serve: what broke one is everybody's error."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("a watcher of the engine broke", exc_info=task.exception())
        self._error = EngineFailed(
            f"The server's watch over the engine broke: {task.exception()!r}.", remedy="Look at server.log."
        )
        self._set("failed")

    def _set(self, state: State) -> None:
        self.state = state
        if state in ("ready", "failed"):
            self._settled.set()
        else:
            self._settled.clear()
