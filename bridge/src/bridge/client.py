"""The client's two DEALER sockets: one reply for every question, or an error that says why not."""

import asyncio
import os
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from bridge import protocol as p
from bridge.endpoint import Connection
from bridge.errors import (
    BridgeError,
    Busy,
    Failure,
    PeerDied,
    ProtocolMismatch,
    Refused,
    Timeout,
    from_failure,
)
from bridge.process import log_tail
from bridge.security import KeyPair, authenticate

SLACK_S = 2.0
"""How much longer than the server the client waits, so that the server's own Timeout arrives first."""

LEASE_FRACTION = 3
BUSY_FIRST_S = 0.05
BUSY_LONGEST_S = 1.0
PEER_CHECK_S = 0.2
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HEARTBEAT_MS = 5000

OnEvent = Callable[[p.Event], None]


@dataclass(slots=True)
class _Pending:
    frames: list[Any]
    reply: asyncio.Future[p.Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Channel:
    """One DEALER socket. Open questions are asked again, under the same id, whenever the connection comes back."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: bytes,
        connection: Connection,
        address: str,
        on_event: OnEvent,
    ) -> None:
        self.address = address
        self.connected = asyncio.Event()
        self.refused: BridgeError | None = None
        self._name = name
        self._sequence = 0
        self._pending: dict[bytes, _Pending] = {}
        self._on_event = on_event
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # BridgeClient bounds what is in flight.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if address.startswith("tcp://"):
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        authenticate(self._socket, connection.server_key, KeyPair(connection.client_public, connection.client_secret))
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(address)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    def next_id(self) -> p.RequestId:
        """An id that was never used."""
        self._sequence += 1
        return p.RequestId(self._name, self._sequence, 0)

    async def ask(self, request_id: bytes, request: p.Request, buffer: bytes | memoryview | None) -> p.Reply:
        """Send a request and wait for its reply, without a limit of its own. A `Failure` is raised as its error."""
        if self.refused:
            raise self.refused
        frames: list[Any] = [request_id, p.encode(request)]
        pending = _Pending(frames if buffer is None else [*frames, buffer])
        self._pending[request_id] = pending
        try:
            await self._socket.send_multipart(pending.frames, copy=buffer is None)
            reply = await pending.reply
        finally:
            del self._pending[request_id]
        if isinstance(reply, Failure):
            raise from_failure(reply)
        return reply

    async def tell(self, request_id: bytes, message: p.Message) -> None:
        """Send something that gets no reply."""
        await self._socket.send_multipart([request_id, p.encode(message)])

    def fail(self, error: BridgeError) -> None:
        """Raise error in every open question."""
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(error)

    async def close(self) -> None:
        """Stop listening; open questions raise PeerDied."""
        self.fail(PeerDied("The client was closed."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                continue
            request_id, header = frames
            try:
                message = p.decode_to_client(header)
            except ProtocolMismatch as error:
                self._settle(request_id, error)
                continue
            if not request_id:
                self._on_event(message)  # type: ignore[arg-type]
                continue
            self._settle(request_id, message)  # type: ignore[arg-type]
            await self.tell(request_id, p.Ack())

    def _settle(self, request_id: bytes, outcome: p.Reply | BridgeError) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.reply.done():
            return
        if isinstance(outcome, BridgeError):
            pending.reply.set_exception(outcome)
        else:
            pending.reply.set_result(outcome)

    async def _watch(self) -> None:
        """Follow the connection: ask everything again when it is back, give up when the server refuses our key."""
        seen_before = False
        while True:
            match (await recv_monitor_message(self._monitor))["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.connected.set()
                    if seen_before:
                        await self._ask_again()
                    seen_before = True
                case zmq.EVENT_DISCONNECTED:
                    self.connected.clear()
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self.refused = Refused(
                        f"The server at {self.address} refused this client's key.",
                        remedy="Use the connection file that this server wrote.",
                    )
                    self.fail(self.refused)

    async def _ask_again(self) -> None:
        for pending in list(self._pending.values()):
            if not pending.reply.done():
                await self._socket.send_multipart(pending.frames)


class BridgeClient:
    """A connection to one server: `ask` anything of the protocol. Holds the run's lease when it was given a run_id."""

    welcome: p.Welcome

    def __init__(self, connection: Connection, on_event: OnEvent | None = None) -> None:
        self.connection = connection
        self._context = zmq.asyncio.Context()
        self._name = _client_name()
        handle = on_event or (lambda _: None)
        self._data = Channel(self._context, self._name, connection, connection.data, handle)
        self._control = Channel(self._context, self._name, connection, connection.control, handle)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._epoch = 0
        self._slots = asyncio.Semaphore(1)

    @classmethod
    async def connect(
        cls,
        connection: Connection,
        *,
        run_id: str = "",
        timeout_s: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> Self:
        """Say hello; with a run_id, hold that run's lease until close. on_event gets what the server pushes.

        Raises Timeout, PeerDied, Refused (another trainer holds the server, wrong key) and ProtocolMismatch.
        """
        self = cls(connection, on_event)
        self._spawn(self._watch_peer())
        try:
            hello = p.Hello(client=f"{os.uname().nodename}:{os.getpid()}", run_id=run_id, deadline_s=timeout_s)
            welcome = await self.ask(hello)
            assert isinstance(welcome, p.Welcome)
            if welcome.protocol != p.PROTOCOL_VERSION:
                raise ProtocolMismatch(
                    f"The server speaks protocol {welcome.protocol}, this client {p.PROTOCOL_VERSION}.",
                    remedy="Run scripts/setup_envs.sh, which installs both halves from this checkout.",
                )
            self.welcome = welcome
            self._epoch = welcome.epoch
            self._slots = asyncio.Semaphore(welcome.limits.max_in_flight)
            if on_event:
                await self.ask(p.Subscribe(deadline_s=timeout_s))
        except BaseException:
            await self.close()
            raise
        if run_id and welcome.lease_s:
            self._spawn(self._keep_lease(welcome.lease_s / LEASE_FRACTION))
        return self

    async def ask(self, request: p.Request, buffer: bytes | memoryview | None = None) -> p.Reply:
        """The reply to a request. buffer: the bytes of `PublishAdapter`, sent without a copy.

        Waits while the server is `Busy`. Raises the error that the server answers, Timeout when
        request.deadline_s has passed, PeerDied as soon as the server's process is known to be gone.
        """
        on_data = isinstance(request, p.DataRequest)
        channel = self._data if on_data else self._control
        try:
            async with asyncio.timeout(request.deadline_s + SLACK_S):
                if not on_data:
                    return await self._ask_until_free(channel, request, buffer)
                async with self._slots:
                    return await self._ask_until_free(channel, request, buffer)
        except TimeoutError as error:
            if isinstance(error, BridgeError):
                raise
            raise self._timed_out(request, channel) from None

    async def close(self) -> None:
        """Let go of the server. Open questions raise PeerDied."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._data.close()
        await self._control.close()
        self._context.destroy(linger=0)

    async def _ask_until_free(self, channel: Channel, request: p.Request, buffer: bytes | memoryview | None) -> p.Reply:
        request = msgspec.structs.replace(request, epoch=self._epoch)
        request_id, pause_s = channel.next_id(), BUSY_FIRST_S
        while True:
            packed = request_id.pack()
            try:
                return await channel.ask(packed, request, buffer)
            except Busy:
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 (spreads retries)
            except asyncio.CancelledError:
                await channel.tell(channel.next_id().pack(), p.Cancel(request_id=packed))
                raise
            pause_s = min(2 * pause_s, BUSY_LONGEST_S)
            request_id = request_id._replace(attempt=request_id.attempt + 1)

    async def _keep_lease(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.ask(p.Lease(deadline_s=every_s))
            except Timeout:
                continue  # The peer watch tells a dead server from a slow one.
            except Refused as error:
                self._fail(error)
                return

    async def _watch_peer(self) -> None:
        """On one host the server's process can be looked at: open questions need not wait out their deadlines."""
        if not self.connection.data.startswith("ipc://"):
            return
        while True:
            await asyncio.sleep(PEER_CHECK_S)
            if not self._control.connected.is_set() and not Path(f"/proc/{self.connection.pid}").exists():
                self._fail(self._peer_died())

    def _fail(self, error: BridgeError) -> None:
        for channel in (self._data, self._control):
            channel.refused = error
            channel.fail(error)

    def _peer_died(self) -> PeerDied:
        path = self.connection.log_path
        return PeerDied(
            f"tandem-server (pid {self.connection.pid}) is gone.",
            why="It was killed or it ended by itself; its log says which.",
            log_path=path,
            log_tail=log_tail(Path(path)) if path else "",
            remedy="`--resume` continues the run from its last checkpoint.",
        )

    def _timed_out(self, request: p.Request, channel: Channel) -> Timeout:
        state = "is up" if channel.connected.is_set() else "is down"
        return Timeout(
            f"No reply to {type(request).__name__} within {request.deadline_s:g} s.",
            why=f"The connection to {channel.address} {state}.",
            log_path=self.connection.log_path,
            log_tail=log_tail(Path(self.connection.log_path)) if self.connection.log_path else "",
        )

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _client_name() -> bytes:
    """A zmq routing id: 16 random bytes of which the first is not zero (zmq keeps those for itself)."""
    name = uuid.uuid4().bytes
    return name if name[0] else _client_name()
