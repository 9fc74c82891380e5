"""The client's two DEALER sockets: one reply for every question, or an error that says why not."""

import asyncio
import logging
import os
import random
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq.asyncio

from bridge import guard
from bridge import protocol as p
from bridge.channel import Channel, OnEvent
from bridge.endpoint import IO_THREAD, Connection
from bridge.errors import BridgeError, Busy, PeerDied, ProtocolMismatch, Refused, Timeout
from bridge.process import log_tail
from bridge.serving_clock import ServingClock

log = logging.getLogger(__name__)

SLACK_S = 2.0
"""How much longer than the server the client waits, so that the server's own Timeout arrives first."""

LEASE_FRACTION = 3
BUSY_FIRST_S = 0.05
BUSY_LONGEST_S = 1.0
PEER_CHECK_S = 0.2
GONE_S = 5.0
"""How long a connection on this host may stay down before its server counts as gone although its process lives."""

GONE_REMOTE_S = 15.0
"""The same for a server on another host, whose process cannot be looked at: its lease has run out by then."""

SILENT_S = 60.0
"""How long a server may leave every heartbeat unanswered before it counts as gone although it lives: it hangs."""


class BridgeClient:
    """A connection to one server: `ask` anything of the protocol. Holds the run's lease when it was given a run_id."""

    welcome: p.Welcome

    def __init__(self, connection: Connection, on_event: OnEvent | None = None) -> None:
        self.connection = connection
        self._context = zmq.asyncio.Context(io_threads=len(IO_THREAD))
        self._name = _client_name()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._epoch = 0
        self._restart_s = 0.0
        self._slots = asyncio.Semaphore(1)
        self._serving = ServingClock()
        self._handle = on_event or (lambda _: None)
        hear, back = self._hear, self._returned
        try:
            self._data = Channel(self._context, self._name, "data", connection, on_event=hear, on_return=lambda: None)
            self._control = Channel(self._context, self._name, "control", connection, on_event=hear, on_return=back)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @classmethod
    async def connect(
        cls,
        connection: Connection,
        *,
        run_id: str = "",
        alone: bool = False,
        again: bool = False,
        timeout_s: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> Self:
        """Say hello; with a run_id, hold that run's lease until close. on_event gets what the server pushes.

        alone: not together with another process of the run that holds it. again: this process holds it already, and
        begins anew.

        Raises Timeout, PeerDied, Refused (another trainer holds the server, wrong key) and ProtocolMismatch.
        """
        self = cls(connection, on_event)
        self._spawn(self._watch_peer())
        try:
            me = f"{os.uname().nodename}:{os.getpid()}"
            hello = p.Hello(client=me, run_id=run_id, alone=alone, again=again, deadline_s=timeout_s)
            welcome = await self.ask(hello)
            if not isinstance(welcome, p.Welcome) or welcome.protocol != p.PROTOCOL_VERSION:
                raise ProtocolMismatch(
                    f"This client speaks protocol {p.PROTOCOL_VERSION}, the server says {welcome}.",
                    remedy="Run scripts/setup_envs.sh, which installs both halves from this checkout.",
                )
            self.welcome = welcome
            self._epoch = welcome.epoch
            self._restart_s = welcome.restart_s
            self._control.max_bytes = welcome.limits.max_adapter_bytes
            self._slots = asyncio.Semaphore(max(1, welcome.limits.max_in_flight))
            await self.ask(p.Subscribe(deadline_s=timeout_s))
        except BaseException:
            await self.close()
            raise
        if run_id and welcome.lease_s:
            self._spawn(self._keep_lease(welcome.lease_s / LEASE_FRACTION))
        return self

    async def ask(self, request: p.Request, buffer: bytes | memoryview | None = None) -> p.Reply:
        """The reply to a request. buffer: the bytes of `PublishAdapter` or `Canary`, sent without a copy.

        Waits while the server is `Busy`. Raises the error that the server answers, Timeout when
        request.deadline_s has passed (of `Work` the server counts it, and until it has room this client, and the time
        without an engine comes on top), PeerDied as soon as the server is known to be gone. Cancelled, or past its
        deadline, it cancels the request at the server too.
        """
        if not request.deadline_s > 0:
            raise self._timed_out(request, "The deadline had passed before it was asked.")
        on_data = isinstance(request, p.DataRequest)
        channel = self._data if on_data else self._control
        now = self._serving.time if isinstance(request, p.Work) else asyncio.get_running_loop().time
        until = now() + request.deadline_s

        def left() -> float:
            return until - now()

        try:
            patience_s = SLACK_S + (self._restart_s if isinstance(request, p.Work) else 0.0)
            async with asyncio.timeout(request.deadline_s + patience_s):
                if not on_data or isinstance(request, p.Lease):  # A heartbeat takes no slot: all of them may be held.
                    return await self._ask_until_free(channel, request, buffer, left)
                async with self._slots:
                    return await self._ask_until_free(channel, request, buffer, left)
        except TimeoutError as error:
            if isinstance(error, BridgeError):
                raise
            state = "is up" if channel.connected.is_set() else "is down"
            raise self._timed_out(request, f"The connection to {channel.address} {state}.") from None

    async def close(self) -> None:
        """Let go of the server. Open questions raise PeerDied.

        Called again, or cancelled, it is still done once, and to its end.
        """
        self._closing = self._closing or asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._data.close()
        await self._control.close()
        await asyncio.to_thread(self._context.destroy, 0)  # Blocks until the last words are out.

    async def _ask_until_free(
        self, channel: Channel, request: p.Request, buffer: bytes | memoryview | None, left: Callable[[], float]
    ) -> p.Reply:
        request_id, pause_s = channel.next_id(), BUSY_FIRST_S
        why = "The server has answered no other request meanwhile: all of max_in_flight are open."
        while (left_s := left()) > 0:
            packed = request_id.pack()
            try:
                asked = msgspec.structs.replace(request, epoch=self._epoch, deadline_s=max(round(left_s, 3), 0.001))
                reply = await channel.ask(packed, asked, buffer)
            except Busy as busy:
                why = busy.what
            except asyncio.CancelledError:
                channel.cancel(packed)
                raise
            else:
                if isinstance(reply, p.Pulse):
                    self._serving.hear(reply)
                return reply
            await channel.pause(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (spreads retries)
            pause_s = min(2 * pause_s, BUSY_LONGEST_S)
            request_id = request_id._replace(attempt=request_id.attempt + 1)
        raise self._timed_out(request, why)

    async def _keep_lease(self, every_s: float) -> None:
        silent_s = 0.0  # Counted, not measured: see _watch_peer.
        while True:
            await asyncio.sleep(every_s)
            heard = self._heard
            try:
                await self.ask(p.Lease(deadline_s=every_s))
            except PeerDied:
                return  # Everybody who asks is told already.
            except Refused as error:
                self._fail(error)
                return
            except BridgeError as error:
                log.warning("the lease was not renewed: %s", error.what)  # The next try is soon.
            silent_s = 0.0 if self._heard != heard else silent_s + 2 * every_s
            if silent_s >= SILENT_S:
                self._fail(self._peer_died(f"lives, and has answered nothing for {SILENT_S:g} s", "It hangs."))
                return

    @property
    def _heard(self) -> int:
        """Messages that have come from the server."""
        return self._data.heard + self._control.heard

    def _hear(self, event: p.Event) -> None:
        if isinstance(event, p.Stats):
            self._serving.hear(event.pulse)
        self._handle(event)

    def _returned(self) -> None:
        """The connection is back; the server may have forgotten who wants its events."""
        self._spawn(self._subscribe_again())

    async def _subscribe_again(self) -> None:
        try:
            await self.ask(p.Subscribe())
        except BridgeError as error:
            log.warning("events of the server are lost from here on: %s", error.what)

    async def _watch_peer(self) -> None:
        """Notice that the server is gone, so that open questions need not wait out their deadlines."""
        local = self.connection.data.startswith("ipc://")
        longest_s = GONE_S if local else GONE_REMOTE_S
        channels = (self._control, self._data)
        down_s = 0.0  # Counted, not measured: the time in which this process itself is stopped is no sign of anything.
        while down_s < longest_s:
            await asyncio.sleep(PEER_CHECK_S)
            up = all(channel.connected.is_set() for channel in channels)
            if not up and local and not guard.living(self.connection.pid):
                self._fail(self._peer_died("is gone"))
                return
            ever_up = all(channel.was_connected for channel in channels)
            down_s = down_s + PEER_CHECK_S if ever_up and not up else 0.0
        self._fail(self._peer_died(f"has not listened for {longest_s:g} s"))

    def _fail(self, error: BridgeError) -> None:
        for channel in (self._data, self._control):
            channel.fail(error)

    def _peer_died(self, what: str, why: str = "It was killed or it ended by itself; its log says which.") -> PeerDied:
        path = self.connection.log_path
        return PeerDied(
            f"tandem-server (pid {self.connection.pid}) {what}.",
            why=why,
            log_path=path,
            log_tail=log_tail(Path(path)) if path else "",
            remedy="`--resume` continues the run from its last checkpoint.",
        )

    def _timed_out(self, request: p.Request, why: str) -> Timeout:
        return Timeout(
            f"No reply to {type(request).__name__} within {request.deadline_s:g} s.",
            why=why,
            log_path=self.connection.log_path,
            log_tail=log_tail(Path(self.connection.log_path)) if self.connection.log_path else "",
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _client_name() -> bytes:
    """A zmq routing id: 16 random bytes of which the first is not zero (zmq keeps those for itself)."""
    name = uuid.uuid4().bytes
    return name if name[0] else _client_name()
