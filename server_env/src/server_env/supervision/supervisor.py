"""Keeps one engine running: notices death and standstill, and starts it again."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeVar

from bridge.errors import BridgeError, EngineFailed, PeerDied, from_failure, to_failure
from server_env.engines.engine import Engine, EngineFacts, EngineGone
from server_env.supervision.engine_process import EngineProcess

log = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["starting", "ready", "restarting", "failed"]

MAX_RESTARTS = 3
"""Restarts without one finished request between them."""

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

    async def engine_needed(self) -> bool:
        """Return when it is to be started again; whether nobody needed it until then."""
        ...

    def engine_restarted(self, seconds: float) -> None:
        """It serves again, after seconds without it."""
        ...

    def engine_given_up(self, error: EngineFailed) -> None:
        """It is gone for good."""
        ...

    def engine_changed(self) -> None:
        """It serves, or not, other than before."""
        ...


class Supervisor:
    """One engine over all its lives. `attempt` is how everybody else talks to it."""

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
        self._missed_since = 0.0
        self._open = 0
        self._error: BridgeError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._examination: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        """The engine; only to be used inside `attempt`."""
        return self._process.engine

    @property
    def pid(self) -> int:
        """The engine's process id, 0 while there is none."""
        return self._process.pid

    @property
    def available(self) -> bool:
        """Whether to ask it anything new: it serves, and has not just dropped a request."""
        return self.state == "ready" and self._examination is None

    @property
    def life(self) -> int:
        """Counts the engine's starts."""
        return self._process.lives

    @property
    def error(self) -> BridgeError:
        """Why it is gone for good: EngineFailed, or PeerDied when the server ends. A new one for whoever raises it."""
        assert self._error
        return from_failure(to_failure(self._error))

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
        """End the engine for good; open calls end with PeerDied: another server can answer them."""
        tasks = [*self._tasks, *([self._examination] if self._examination else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._error is None:
            self._error = PeerDied(
                "The server ended before it had answered.",
                why="It was told to, or had not heard of its trainer for too long: server.log says which.",
            )
        self._set("failed")
        await self._process.stop()

    async def attempt(self, work: Callable[[Engine], Awaitable[T]]) -> T:
        """The result of work on this life of the engine. Raises EngineGone when it is lost: see `examined`."""
        life = self._process.lives
        self._open += 1
        try:
            result = await work(self.engine)
        except EngineGone:
            self._examine(life)
            raise
        finally:
            self._open -= 1
        self.finished += 1
        self._unanswered_restarts = 0
        return result

    async def examined(self) -> None:
        """After a lost request: return when that life is known to be over, or to be well after all."""
        if self._examination:
            await asyncio.wait([self._examination])

    def failure(self, what: str) -> EngineFailed:
        """An EngineFailed about its last life, with the cause that its log names."""
        return self._process.failure(what)

    async def replace(self, life: int, why: str) -> None:
        """End a life that cannot go on as it is; the next one begins by itself."""
        if not self._over(life):
            log.error("%s: ending %s", why, self._process.name)
            await self._process.stop()
            self._note_end(life)

    async def hurry(self) -> None:
        """Kill the engine now, and whatever is stopped from here on."""
        await self._process.hurry()

    def _examine(self, life: int) -> None:
        """A request of this life was dropped: find out whether it is over."""
        if not self._over(life) and self._examination is None:
            self._examination = asyncio.create_task(self._end_unless_well(life))
            self._examination.add_done_callback(self._examination_ended)
            self._observer.engine_changed()

    def _examination_ended(self, task: asyncio.Task[None]) -> None:
        self._examination = None
        self._watcher_ended(task)
        self._observer.engine_changed()

    async def _end_unless_well(self, life: int) -> None:
        try:
            async with asyncio.timeout(LAST_BREATH_S):
                await self._process.wait()
        except TimeoutError:
            if await self._is_well() or self._over(life):
                return
            log.warning("%s dropped a request and does not answer: ending it", self._process.name)
            await self._process.stop()
        self._note_end(life)

    def _note_end(self, life: int) -> None:
        """What _keep_alive is about to say: nobody should ask this life anything meanwhile."""
        if not self._over(life):
            self._set("restarting")

    def _over(self, life: int) -> bool:
        return life != self._process.lives or self.state != "ready"

    async def _is_well(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_S):
                await self.engine.probe()
        except (EngineGone, EngineFailed, TimeoutError):
            return False
        return True

    async def _keep_alive(self) -> None:
        """Wait for each life to end, and begin the next."""
        while True:
            code = await self._process.wait()
            self._missed_since = time.monotonic()
            error = self._process.failure(f"The engine ended with code {code}.")
            self._set("restarting")
            log.warning("%s: %s %s", self._process.name, error.what, error.why)
            self._observer.engine_died(error)
            await self._process.stop()
            if not await self._restart(error):
                return
            self._set("ready")
            self._observer.engine_restarted(time.monotonic() - self._missed_since)

    async def _restart(self, error: EngineFailed) -> bool:
        """The next life, after at most MAX_RESTARTS tries, each once it is needed; whether there is one."""
        while self._unanswered_restarts < MAX_RESTARTS:
            if await self._observer.engine_needed():
                self._missed_since = time.monotonic()
            self._unanswered_restarts += 1
            self.restarts += 1
            try:
                self.facts = await self._process.start(self._startup_timeout_s)
                await self._observer.engine_started(self.engine)
            except EngineGone:
                error = self._process.failure("The engine died while its adapters were loaded.")
            except BridgeError as failed:
                error = self._process.failure(f"The engine did not start again: {failed.what}", failed.remedy)
            else:
                return True
            log.warning("%s, life %d: %s %s", self._process.name, self.life, error.what, error.why)
            await self._process.stop()
        final = EngineFailed(
            f"The engine failed {MAX_RESTARTS} times in a row without finishing a request. {error.what}",
            why=error.why,
            log_path=error.log_path,
            log_tail=error.log_tail,
            remedy=error.remedy,
        )
        log.error("%s: %s", self._process.name, final)
        self._give_up(final)
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
            async with asyncio.timeout(HEALTH_S):
                return await self.engine.progress()
        except (EngineGone, BridgeError, TimeoutError):
            return None

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        """Without its watchers an engine must not serve: what broke one is everybody's error."""
        if task.cancelled() or task.exception() is None:
            return
        log.error("a watcher of %s broke", self._process.name, exc_info=task.exception())
        self._give_up(
            EngineFailed(
                f"The server's watch over the engine broke: {task.exception()!r}.", remedy="Look at server.log."
            )
        )

    def _give_up(self, error: EngineFailed) -> None:
        self._error = error
        self._set("failed")
        self._observer.engine_given_up(error)

    def _set(self, state: State) -> None:
        self.state = state
        self._observer.engine_changed()
