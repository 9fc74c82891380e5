"""One engine of several that are alike: which adapters its present life holds, whether it sleeps, how busy it is."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from bridge.errors import BridgeError, EngineFailed, Refused
from server_env.config import ServerConfig
from server_env.engines.engine import Engine, EngineGone
from server_env.supervision.engine_process import EngineProcess
from server_env.supervision.slots import GUEST, Slots
from server_env.supervision.supervisor import Supervisor

log = logging.getLogger(__name__)

T = TypeVar("T")
Level = Literal["awake", "asleep", "weights"]
"""weights: half awake, which is enough to load adapters. An engine goes round in this order."""

PROOF_TRIES = 3

UNLOAD_TIMEOUT_S = 15.0
"""No request of ours is in flight under an adapter that is unloaded. An engine that waits for one all the same has lost
count, and SGLang loads nothing meanwhile."""


class Prove(Protocol):
    """How an engine shows what it computes."""

    def __call__(self, engine: Engine, /, *, alone: bool) -> Awaitable[None]:
        """Raise EngineFailed unless an engine computes what the others do. alone: it works on nothing else."""
        ...


class Group(Protocol):
    """What all engines of one server are to be like, and who wants to know what becomes of one."""

    @property
    def level(self) -> Level:
        """How awake they are to be."""
        ...

    @property
    def resting(self) -> bool:
        """Whether an engine that is gone is to stay so for now."""
        ...

    def live_adapters(self) -> Mapping[str, Path]:
        """What requests may name: names and folders."""
        ...

    @property
    def prove(self) -> Prove:
        """The proof that an engine is like the others."""
        ...

    def changed(self) -> None:
        """An engine can be asked more, or less, than before."""
        ...

    async def next_change(self) -> None:
        """Wait for it."""
        ...

    def died(self, error: EngineFailed) -> None:
        """One is gone, and is started again."""
        ...

    def restarted(self, seconds: float) -> None:
        """It serves again, after seconds without it."""
        ...

    def given_up(self, error: EngineFailed) -> None:
        """It is gone for good."""
        ...


@dataclass
class Life:
    """What one life of an engine was brought to. What comes back late from an older life changes nothing of it."""

    adapters: set[str] = field(default_factory=set)
    level: Level = "awake"
    proof: asyncio.Task[None] | None = None
    """Begun when it woke. What it is asked meanwhile is answered once it has shown that it computes what it did."""

    async def proven(self) -> None:
        """Return when it has; raises EngineGone when it has not."""
        if self.proof:
            await asyncio.shield(self.proof)


class Replica:
    """An engine, which as its supervisor's observer it brings to what the others are before anybody asks it anything.

    load: sequences that it is working on. rests: it is gone, and not started again before it is needed.
    """

    def __init__(self, process: EngineProcess, group: Group, server: ServerConfig) -> None:
        self.load = 0
        self.rests = False
        self.supervisor = Supervisor(
            process, self, startup_timeout_s=server.startup_timeout_s, stall_timeout_s=server.stall_timeout_s
        )
        self._group = group
        self._load_timeout_s = server.load_timeout_s
        self._slots = Slots(process.engine.adapter_slots, group.changed)
        self._life = Life()

    @property
    def serves(self) -> bool:
        """Whether it answers, as far as is known."""
        return self.supervisor.state == "ready"

    @property
    def level(self) -> Level:
        """How awake it is."""
        return self._life.level

    def holds(self, adapter: str) -> bool:
        """Whether it can be asked under that name; the base model's is empty."""
        return not adapter or adapter in self._life.adapters

    def takes(self, adapter: str, *, as_guest: bool = False) -> bool:
        """Whether a request under that name may go to it now. as_guest: the request brings the adapter along."""
        return self.supervisor.available and (as_guest or self.holds(adapter)) and self._slots.room_for(adapter)

    async def ask(self, work: Callable[[Engine], Awaitable[T]], adapter: str, sequences: int) -> T:
        """The result of a request that it takes. Raises EngineGone when it is lost."""
        life = self._life

        async def answered(engine: Engine) -> T:
            result = await work(engine)
            await life.proven()
            return result

        with self.busy(adapter, sequences):
            return await self.supervisor.attempt(answered)

    @contextlib.contextmanager
    def busy(self, adapter: str, sequences: int) -> Iterator[None]:
        """Around a request that it takes."""
        with self._slots.taken(adapter):
            self.load += sequences
            try:
                yield
            finally:
                self.load -= sequences

    async def proven(self) -> None:
        """Return when it may be asked by somebody who reads answers as they come. Raises EngineGone."""
        await self._life.proven()

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter. Raises Refused, EngineFailed, and EngineGone once it is known whether it lives."""
        await self._change(lambda engine: self._load(engine, name, path))

    async def turn(self, level: Level) -> None:
        """Go round to that level. Raises EngineFailed, and EngineGone once it is known whether it lives.

        One that has woken up is asked at once, and answers when it is proven; one that fails that is replaced.
        """
        await self._change(lambda engine: self._turn(engine, level, self._begin_to_prove))

    async def prove(self) -> None:
        """Have it show that it computes what the others do; one that does not is replaced."""
        with contextlib.suppress(EngineGone):
            await self._prove(self._life)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter. An engine that cannot is replaced."""
        number = self.supervisor.life
        self._life.adapters.discard(name)
        try:
            async with asyncio.timeout(min(UNLOAD_TIMEOUT_S, self._load_timeout_s)):
                await self.supervisor.engine.unload_adapter(name)
        except TimeoutError:
            await self.supervisor.replace(number, f"adapter {name} cannot be unloaded")
        except (BridgeError, EngineGone) as error:
            log.warning("adapter %s was not unloaded from one engine: %r", name, error)

    # ---- its lives (see supervisor.Observer) -------------------------------------------------------------------------

    async def engine_started(self, engine: Engine) -> None:
        """Bring a new life to what the others are. That may change meanwhile, so the last look is followed by no wait.

        Raises EngineFailed, EngineGone.
        """
        await self._group.prove(engine, alone=True)
        life = self._life = Life()
        while True:
            live = self._group.live_adapters()
            missing = next((name for name in live if name not in life.adapters), "")
            stale = next((name for name in life.adapters if name not in live), "")
            if (missing or stale) and life.level == "asleep":
                await self._turn(engine, "weights", self._prove_alone)
            elif stale:
                await self.unload_adapter(stale)
            elif missing:
                await self._load_again(engine, missing, live[missing])
            elif life.level != self._group.level:
                await self._turn(engine, self._group.level, self._prove_alone)
            else:
                return

    def engine_died(self, error: EngineFailed) -> None:
        """Pass it on."""
        self._group.died(error)

    async def engine_needed(self) -> bool:
        """Rest while the group does: it holds no memory meanwhile, as if it slept."""
        if not self._group.resting:
            return False
        self.rests = True
        self._group.changed()
        try:
            while self._group.resting:
                await self._group.next_change()
        finally:
            self.rests = False
            self._group.changed()
        return True

    def engine_restarted(self, seconds: float) -> None:
        """Pass it on."""
        self._group.restarted(seconds)

    def engine_given_up(self, error: EngineFailed) -> None:
        """Pass it on."""
        self._group.given_up(error)

    def engine_changed(self) -> None:
        """Pass it on."""
        self._group.changed()

    # ---- one change of a life ----------------------------------------------------------------------------------------

    async def _change(self, work: Callable[[Engine], Awaitable[None]]) -> None:
        try:
            await self.supervisor.attempt(work)
        except EngineGone:
            await self.supervisor.examined()
            raise

    async def _load(self, engine: Engine, name: str, path: Path) -> None:
        life = self._life
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await engine.load_adapter(name, path)
        except TimeoutError:
            raise EngineFailed(
                f"The engine did not load adapter {name} within {self._load_timeout_s:g} s.",
                why="It is stuck, or busy with very long steps.",
                remedy="Raise server.load_timeout_s if its log shows that it was working.",
            ) from None
        life.adapters.add(name)

    async def _load_again(self, engine: Engine, name: str, path: Path) -> None:
        try:
            await self._load(engine, name, path)
        except Refused as error:
            raise EngineFailed(f"Adapter {name}, which served before, does not load: {error.what}") from None

    async def _prove_alone(self, engine: Engine) -> None:
        await self._group.prove(engine, alone=True)

    async def _begin_to_prove(self, _engine: Engine) -> None:
        """Beside what it is asked: the proof of a wake takes longer than the wake."""
        life = self._life
        life.proof = asyncio.create_task(self._prove(life))
        life.proof.add_done_callback(lambda task: task.cancelled() or task.exception())  # Perhaps nobody asks.

    async def _prove(self, life: Life) -> None:
        """Have a life show that it computes what the others do, or replace it. Raises EngineGone if it is replaced.

        A request of the proof may be lost although the engine is well; then all of it is asked again.
        """
        number = self.supervisor.life
        try:
            with self._slots.taken(GUEST):
                for tries_left in reversed(range(PROOF_TRIES)):
                    try:
                        return await self._change(lambda engine: self._group.prove(engine, alone=False))
                    except EngineGone:
                        if not tries_left or self._life is not life or not self.serves:
                            raise
        except Exception as why:  # Whatever it is, the engine has not been proven.
            await self.supervisor.replace(number, f"an engine has not shown that it computes what it should: {why}")
            raise EngineGone(str(why)) from why

    async def _turn(self, engine: Engine, level: Level, prove: Callable[[Engine], Awaitable[None]]) -> None:
        life = self._life
        while life.level != level:
            match life.level:
                case "awake":
                    await life.proven()
                    await engine.sleep()
                    life.level = "asleep"
                case "asleep":
                    await engine.wake_weights()
                    life.level = "weights"
                case "weights":
                    await engine.wake()
                    await prove(engine)
                    life.level = "awake"
