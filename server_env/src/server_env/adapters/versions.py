"""Adapter versions: published, loaded under a name of their own, switched to, counted in use, retired.

The newest `kept` versions can be named by requests. An older one is *outgoing*: it stays loaded until the last request
that began with it is answered. Requests hold a version through `lease`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError, PeerDied, StaleVersion, Timeout
from bridge.protocol import AdapterLoaded, PublishAdapter
from server_env.adapters.peft_adapter import BaseModel, check
from server_env.adapters.spool import Spool
from server_env.supervision.replicas import Replicas
from server_env.tasks import to_its_end

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Loaded:
    """One adapter as the engines hold it. name: the engine's, never used twice in one life of the server."""

    name: str
    path: Path
    digest: str
    config: dict[str, Any]
    users: int = 0
    """Versions that are this adapter: more than one when bytes were published again."""


@dataclass(eq=False, slots=True)
class Version:
    """What a request asks for. adapter: None for the base model. requests: those in flight under it."""

    number: int
    adapter: Loaded | None
    answer: AdapterLoaded
    requests: int = 0

    @property
    def name(self) -> str:
        """What the engine calls it; empty for the base model."""
        return self.adapter.name if self.adapter else ""


BASE = AdapterLoaded(version=0, name="", nbytes=0, spool_s=0.0, load_s=0.0)


@dataclass
class AdapterLimits:
    """max_rank as the engines were started; kept: newest versions that can be named; held: adapters loaded at once."""

    max_rank: int
    kept: int
    held: int


@dataclass
class Adapters:
    """All versions of one server."""

    replicas: Replicas
    spool: Spool
    base: BaseModel
    limits: AdapterLimits
    newest: int = 0
    _versions: dict[int, Version] = field(default_factory=lambda: {0: Version(0, None, BASE)})
    _outgoing: set[Version] = field(default_factory=set)
    _waiting: list[tuple[int, asyncio.Future[None]]] = field(default_factory=list)
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _refused: tuple[int, BridgeError] | None = None
    """The last publish that failed, until another one is tried: nobody need wait for that version."""
    _any_next: bool = True
    _epoch: int = 0
    _names: set[str] = field(default_factory=set)
    _to_delete: Path | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.replicas.live_adapters = self._live

    @property
    def loaded(self) -> tuple[int, ...]:
        """Versions that requests may name, the base model aside."""
        return tuple(sorted(self._versions.keys() - {0}))

    @property
    def in_use(self) -> dict[int, int]:
        """Requests in flight by version."""
        return {v.number: v.requests for v in self._all() if v.requests}

    @property
    def waiting(self) -> int:
        """Requests that are held until a version is published."""
        return len(self._waiting)

    @contextlib.asynccontextmanager
    async def lease(self, version: int, min_version: int) -> AsyncIterator[Version]:
        """Hold a version: exactly `version`, or with -1 the newest one once it is at least min_version.

        Raises StaleVersion for one that will never be served, and the publisher's error when the publish that this
        waits for is refused.
        """
        await self._wait_for(max(version, min_version))
        held = self._versions.get(self.newest if version < 0 else version)
        if held is None:
            raise StaleVersion(
                f"Adapter version {version} is no longer served; the server has {self.loaded}.",
                remedy="Ask for a newer one, or raise server.max_staleness.",
            )
        held.requests += 1
        try:
            yield held
        finally:
            held.requests -= 1
            self._retire_outgoing()

    def version_of(self, name: str) -> int | None:
        """The newest version that requests may name and that engines call so; None for a name of nothing served."""
        return max((v.number for v in self._versions.values() if name and v.name == name), default=None)

    def was_published(self, name: str) -> bool:
        """Whether that is an adapter's name for the engines, served or not."""
        return name in self._names

    async def publish(self, request: PublishAdapter, data: memoryview | None) -> AdapterLoaded:
        """Make an adapter the newest version. Raises Refused or StaleVersion, and then the last one serves on."""
        async with self._publishing:
            if known := self._published_before(request):
                return known
            self._refused = None
            try:
                answer = await self._publish(request, memoryview(b"") if data is None else data)
            except PeerDied:  # The server ends, and tells everybody so.
                raise
            except BridgeError as error:
                self._fail_waiting(request.version, error)
                raise
            except asyncio.CancelledError:
                self._fail_waiting(request.version, Timeout("its publish was cancelled, or its deadline passed."))
                raise
        log.info("version %d serves: %s", answer.version, answer)
        return answer

    def _published_before(self, request: PublishAdapter) -> AdapterLoaded | None:
        newest = self._versions[self.newest]
        if newest.adapter and request.version == self.newest and request.digest == newest.adapter.digest:
            return newest.answer
        if request.version < 1 or (request.version <= self.newest and not self._any_next):
            raise StaleVersion(
                f"Adapter version {request.version} came after version {self.newest}.",
                why="Versions are optimizer steps, and rise.",
                remedy="A run that goes back to an older checkpoint attaches anew; its first version may be any.",
            )
        return None

    async def _publish(self, request: PublishAdapter, data: memoryview) -> AdapterLoaded:
        newest = self._versions[self.newest].adapter
        if newest and newest.digest == request.digest and newest.config == request.adapter_config:
            answer = AdapterLoaded(
                version=request.version,
                name=newest.name,
                nbytes=len(data),
                spool_s=0.0,
                load_s=0.0,
                alias_of=self.newest,
            )
            return self._switch(Version(request.version, newest, answer))
        epoch = self._epoch
        await self._until_there_is_room()
        started = time.monotonic()
        name = self._new_name(request.version)
        try:
            adapter = await to_its_end(asyncio.to_thread(self._spool, name, request, data))
        except asyncio.CancelledError:
            self.spool.delete(self.spool.folder / name)
            raise
        spooled = time.monotonic()
        try:
            await self.replicas.load_adapter(adapter.name, adapter.path)
            if epoch != self._epoch:
                raise StaleVersion(f"Another trainer took over while version {request.version} was loaded.")
        except BaseException:
            self._drop(adapter)
            raise
        answer = AdapterLoaded(
            version=request.version,
            name=adapter.name,
            nbytes=len(data),
            spool_s=spooled - started,
            load_s=time.monotonic() - spooled,
        )
        return self._switch(Version(request.version, adapter, answer))

    def _spool(self, name: str, request: PublishAdapter, data: memoryview) -> Loaded:
        check(request.adapter_config, data, max_rank=self.limits.max_rank, base=self.base)
        path = self.spool.write(name, data, request.digest, request.adapter_config)
        return Loaded(name, path, request.digest, request.adapter_config)

    def _switch(self, version: Version) -> AdapterLoaded:
        """From here on new requests get this version."""
        if version.adapter:
            version.adapter.users += 1
        if version.number <= self.newest:  # The first version of a new epoch: those of the last one are history.
            self._let_go(lambda number: number != 0)
        self._versions[version.number] = version
        self.newest = version.number
        self._any_next = False
        kept = sorted(self._versions)[-self.limits.kept :]
        self._let_go(lambda number: number != 0 and number not in kept)
        for minimum, waiter in self._waiting:
            if minimum <= self.newest and not waiter.done():
                waiter.set_result(None)
        return version.answer

    def new_epoch(self, *, same_run: bool) -> None:
        """Another trainer took over: its first version may be any. Versions of another run are no longer served."""
        self._epoch += 1
        self._any_next = True
        self._refused = None
        if not same_run:
            self.newest = 0
            self._let_go(lambda number: number != 0)

    @contextlib.asynccontextmanager
    async def room_for_a_guest(self) -> AsyncIterator[None]:
        """Hold a place in the engines for an adapter that is loaded, asked and unloaded meanwhile, and never served."""
        async with self._publishing:
            await self._until_there_is_room()
            yield

    async def close(self) -> None:
        """Stop retiring; the files go with the spool."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _all(self) -> Iterator[Version]:
        yield from self._versions.values()
        yield from self._outgoing

    def _live(self) -> dict[str, Path]:
        """Adapters that requests may name, or are in flight under."""
        return {v.adapter.name: v.adapter.path for v in self._all() if v.adapter}

    async def _wait_for(self, minimum: int) -> None:
        if minimum <= self.newest:
            return
        if self._refused and minimum <= self._refused[0]:
            raise _was_refused(*self._refused)
        waiter = (minimum, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            await waiter[1]
        finally:
            self._waiting.remove(waiter)

    def _fail_waiting(self, version: int, error: BridgeError) -> None:
        self._refused = (version, error)
        for minimum, waiter in self._waiting:
            if minimum <= version and not waiter.done():
                waiter.set_exception(_was_refused(version, error))

    async def _until_there_is_room(self) -> None:
        """Publishing waits for requests that hold old versions rather than have an engine drop one of theirs."""
        while len(self._live()) + 1 > self.limits.held:
            self._room.clear()
            await self._room.wait()

    def _new_name(self, version: int) -> str:
        """`policy-v000012`; with a suffix where that name was used before, for engines cache under names."""
        name = plain = f"policy-v{version:06d}"
        tries = 1
        while name in self._names:
            tries += 1
            name = f"{plain}-{tries}"
        self._names.add(name)
        return name

    def _let_go(self, which: Callable[[int], bool]) -> None:
        for number in [n for n in self._versions if which(n)]:
            self._outgoing.add(self._versions.pop(number))
        self._retire_outgoing()

    def _retire_outgoing(self) -> None:
        for version in [v for v in self._outgoing if not v.requests]:
            self._outgoing.remove(version)
            adapter = version.adapter
            if adapter:
                adapter.users -= 1
                if not adapter.users:
                    self._drop(adapter)
        self._room.set()

    def _drop(self, adapter: Loaded) -> None:
        """Unload an adapter that no request can name. Its files go one retirement later: the engine may still be on its
        way to hear that the last request under it was cancelled.
        """
        late, self._to_delete = self._to_delete, adapter.path
        task = asyncio.create_task(self._forget(adapter.name, late))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, name: str, late: Path | None) -> None:
        await self.replicas.unload_adapter(name)
        if late:
            await asyncio.to_thread(self.spool.delete, late)


def _was_refused(version: int, error: BridgeError) -> StaleVersion:
    return StaleVersion(
        f"Adapter version {version}, which this request waited for, was refused: {error.what}",
        why=error.why,
        log_path=error.log_path,
        log_tail=error.log_tail,
        remedy=error.remedy,
    )
