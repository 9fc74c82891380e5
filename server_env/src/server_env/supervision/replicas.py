"""All engines of one server, asked as if they were one.

A request goes whole to the least busy engine that holds its adapter, and to another one when that engine is lost. What
changes an engine (an adapter, sleep) goes to every one that serves; one that comes back is brought to the same before
it serves, so that none is ever asked for what it does not hold.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from bridge.errors import BridgeError, EngineFailed, PeerDied
from server_env.config import ServerConfig
from server_env.engines.engine import Engine, EngineFacts, EngineGone
from server_env.supervision.engine_process import EngineProcess
from server_env.supervision.replica import Level, Prove, Replica
from server_env.supervision.serving_time import ServingTime
from server_env.supervision.supervisor import MAX_RESTARTS, State
from server_env.tasks import together

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_TRIES = 4
"""Times that one request is asked: it may be what kills the engine."""

BEST_FIRST: tuple[State, ...] = ("ready", "restarting", "starting", "failed")


class Observer(Protocol):
    """Who wants to know what becomes of the engines."""

    def engine_died(self, error: EngineFailed, *, for_good: bool) -> None:
        """One is gone; for_good: it is not started again."""
        ...

    def engine_restarted(self, seconds: float) -> None:
        """It serves again, after seconds without it."""
        ...


class Replicas:
    """The engines. live_adapters: what requests may name, and so what an engine must hold before it serves.

    prove: raises EngineFailed for an engine that does not compute what it should; called after each start and wake.
    turns: whether they sleep for a trainer that computes on their GPUs meanwhile.
    """

    def __init__(self, processes: Sequence[EngineProcess], observer: Observer, server: ServerConfig) -> None:
        self.level: Level = "awake"
        self.waiting = 0
        """Requests for which no engine has room just now."""
        self.serving_time = ServingTime()
        self.restart_s = MAX_RESTARTS * (server.startup_timeout_s + server.load_timeout_s)
        """How long none may serve before the last one is given up."""
        self.prove: Prove = _nothing_to_prove
        self.live_adapters: Callable[[], Mapping[str, Path]] = dict
        self.turns: Callable[[], bool] = lambda: True
        self._observer = observer
        self._change = asyncio.Event()
        self._all = [Replica(process, self, server) for process in processes]

    @property
    def engine(self) -> Engine:
        """One of them, for what is the same of all: its name, its model, its limits."""
        return self._all[0].supervisor.engine

    @property
    def facts(self) -> EngineFacts | None:
        """What they say of themselves; None before the start."""
        return self._all[0].supervisor.facts

    @property
    def state(self) -> State:
        """That of the one that is best off."""
        states = {replica.supervisor.state for replica in self._all}
        return next(state for state in BEST_FIRST if state in states)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in the engines' order, 0 for one that does not run."""
        return tuple(replica.supervisor.pid for replica in self._all)

    @property
    def restarts(self) -> int:
        """Of all engines."""
        return sum(replica.supervisor.restarts for replica in self._all)

    @property
    def finished(self) -> int:
        """Requests that any engine has answered."""
        return sum(replica.supervisor.finished for replica in self._all)

    @property
    def engines(self) -> dict[str, Engine]:
        """All, whatever their state, by what tells their figures apart."""
        return {str(number): replica.supervisor.engine for number, replica in enumerate(self._all)}

    @property
    def resting(self) -> bool:
        """Whether an engine that is gone is to stay so for now: its memory is the trainer's until they wake."""
        return self.level == "asleep" and self.turns()

    @property
    def _all_rest(self) -> bool:
        left = [replica for replica in self._all if replica.supervisor.state != "failed"]
        return bool(left) and all(replica.rests for replica in left)

    def each(self) -> list[tuple[bool, int]]:
        """Of each engine: whether it serves, and how often it was started again."""
        return [(replica.serves, replica.supervisor.restarts) for replica in self._all]

    def serving(self) -> dict[int, Engine]:
        """Those that answer, by their number, the least busy first."""
        found = {number: replica for number, replica in enumerate(self._all) if replica.serves}
        return {n: found[n].supervisor.engine for n in sorted(found, key=lambda n: found[n].load)}

    async def start(self) -> None:
        """The first start of all at once. Raises EngineFailed when one does not come up: none is tried again."""
        await together(replica.supervisor.start() for replica in self._all)

    async def stop(self) -> None:
        """End all for good; open calls end with PeerDied."""
        await _each(replica.supervisor.stop() for replica in self._all)

    async def hurry(self) -> None:
        """Kill all now, and whatever is stopped from here on."""
        await _each(replica.supervisor.hurry() for replica in self._all)

    async def call(
        self,
        work: Callable[[Engine], Awaitable[T]],
        *,
        adapter: str = "",
        sequences: int = 1,
        as_guest: bool = False,
    ) -> T:
        """The result of work on one engine, asked again (MAX_TRIES) of another one when that is lost.

        adapter: the name under which it asks; sequences: how much work that is; as_guest: it loads that adapter itself,
        and unloads it. Raises EngineFailed, and PeerDied when the server ends.
        """
        for tries_left in reversed(range(MAX_TRIES)):
            replica = await self._least_busy(adapter, as_guest=as_guest)
            try:
                return await replica.ask(work, adapter, sequences)
            except EngineGone as error:
                if not tries_left:
                    raise _lost(replica, f"this request: {error}") from None
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def one(self, adapter: str, sequences: int) -> AsyncIterator[Engine]:
        """An engine for a request that is asked once, whatever becomes of it. Raises EngineGone, EngineFailed, and
        PeerDied when the server ends.
        """
        replica = await self._least_busy(adapter, as_guest=False)
        with replica.busy(adapter, sequences):
            await replica.proven()
            yield replica.supervisor.engine

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter into every engine that serves. Raises Refused and EngineFailed when none takes it.

        When this returns, and until the caller waits for anything, all that serve hold it: from then on `live_adapters`
        must name it.
        """
        await self._change_all(lambda r: r.load_adapter(name, path), lambda r: r.holds(name), f"adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        """Have all engines forget an adapter that `live_adapters` does not name any more."""
        await asyncio.gather(*(replica.unload_adapter(name) for replica in self._all if replica.serves))

    async def turn(self, level: Level) -> None:
        """Have all engines wake or sleep, those that come back later too. Raises EngineFailed when none can."""
        self.level = level
        self.changed()
        await self._change_all(lambda r: r.turn(level), lambda r: r.level == level, f"being {level}")

    async def prove_all(self, but: Engine) -> None:
        """Have all engines that serve, but one, show that they compute what they should; replace those that do not."""
        others = [replica for replica in self._all if replica.serves and replica.supervisor.engine is not but]
        await asyncio.gather(*(replica.prove() for replica in others))

    # ---- what becomes of one (see replica.Group) ---------------------------------------------------------------------

    def changed(self) -> None:
        """Wake everybody who waits for an engine. While one is needed and none serves, time limits stand still."""
        self.serving_time.passes(self.state == "ready" or self._all_rest)
        self._change.set()
        self._change = asyncio.Event()

    async def next_change(self) -> None:
        """Wait until an engine can be asked more, or less, or is needed again."""
        await self._change.wait()

    def died(self, error: EngineFailed) -> None:
        """Pass it on."""
        self._observer.engine_died(error, for_good=False)

    def restarted(self, seconds: float) -> None:
        """Pass it on."""
        self._observer.engine_restarted(seconds)

    def given_up(self, error: EngineFailed) -> None:
        """The others go on, if there are any."""
        left = sum(replica.supervisor.state != "failed" for replica in self._all)
        log.error("an engine has left for good; %d of %d go on", left, len(self._all))
        self._observer.engine_died(error, for_good=True)

    # ---- choosing ----------------------------------------------------------------------------------------------------

    async def _least_busy(self, adapter: str, *, as_guest: bool) -> Replica:
        self.waiting += 1
        try:
            while not (free := [replica for replica in self._all if replica.takes(adapter, as_guest=as_guest)]):
                await self._until_changed()
        finally:
            self.waiting -= 1
        return min(free, key=lambda replica: replica.load)

    async def _that_serve(self) -> list[Replica]:
        """At least one; but none when all rest: as they start they are brought to what they should be."""
        while not (serving := [replica for replica in self._all if replica.serves]):
            if self.resting and self._all_rest:
                return []
            await self._until_changed()
        return serving

    async def _until_changed(self) -> None:
        if self.state == "failed":
            errors = [replica.supervisor.error for replica in self._all]
            raise next((error for error in errors if isinstance(error, PeerDied)), errors[0])
        await self.next_change()

    async def _change_all(
        self, work: Callable[[Replica], Awaitable[None]], done: Callable[[Replica], bool], what: str
    ) -> None:
        """Until every engine that serves is done, those included that come back meanwhile.

        One that fails where another succeeded is replaced. Raises its error when none succeeded.
        """
        lost = 0
        while todo := [replica for replica in await self._that_serve() if not done(replica)]:
            lives = {replica: replica.supervisor.life for replica in todo}
            outcomes = await asyncio.gather(*map(work, todo), return_exceptions=True)
            errors = {replica: outcome for replica, outcome in zip(todo, outcomes, strict=True) if outcome is not None}
            for replica, error in errors.items():
                if isinstance(error, EngineGone):
                    continue
                if not isinstance(error, BridgeError) or not any(done(other) for other in self._all if other.serves):
                    raise error
                await replica.supervisor.replace(lives[replica], f"{what} failed here alone: {error.what}")
            lost += bool(errors)
            if lost == MAX_TRIES:
                raise _lost(next(iter(errors)), f"{what}: {next(iter(errors.values()))}")


async def _nothing_to_prove(_engine: Engine, /, *, alone: bool) -> None:
    del alone


def _lost(replica: Replica, what: str) -> EngineFailed:
    return replica.supervisor.failure(f"The engine was lost {MAX_TRIES} times while it worked on {what}")


async def _each(endings: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, whatever becomes of one; then raise the first error."""
    for outcome in await asyncio.gather(*endings, return_exceptions=True):
        if outcome is not None:
            raise outcome
