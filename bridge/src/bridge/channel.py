"""One DEALER socket of a client: replies by request id, questions asked again after a reconnect, failures said once."""

import asyncio
import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from bridge import protocol as p
from bridge.endpoint import IO_THREAD, IPC_BUFFER_BYTES, Connection
from bridge.errors import BridgeError, ConfigError, Failure, PeerDied, ProtocolMismatch, Refused, from_failure
from bridge.security import KeyPair, authenticate

log = logging.getLogger(__name__)

MAX_BROKEN_HANDSHAKES = 5
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
HEARTBEAT_MS = 5000
CLOSE_LINGER_MS = 200
EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)

Kind = Literal["data", "control"]
OnEvent = Callable[[p.Event], None]


@dataclass(slots=True)
class _Pending:
    frames: list[Any]
    reply: asyncio.Future[p.Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Channel:
    """One DEALER socket. Open questions are asked again, under the same id, whenever the connection comes back.

    on_return is called then. A channel that failed stays failed.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        name: bytes,
        kind: Kind,
        connection: Connection,
        *,
        on_event: OnEvent,
        on_return: Callable[[], None],
    ) -> None:
        self.address = address = connection.data if kind == "data" else connection.control
        self.connected = asyncio.Event()
        self.was_connected = False
        self.heard = 0
        """Messages that have come."""
        self.max_bytes = p.MAX_DATA_BYTES if kind == "data" else p.MAX_CONTROL_BYTES
        """Largest frame that the server takes: it drops the connection over a larger one."""
        self._name = name
        self._sequence = 0
        self._pending: dict[bytes, _Pending] = {}
        self._failure: BridgeError | None = None
        self._failed = asyncio.Event()
        self._on_event = on_event
        self._on_return = on_return
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.AFFINITY, IO_THREAD[kind])
        self._socket.setsockopt(zmq.IDENTITY, name)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # BridgeClient bounds what is in flight.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        if address.startswith("ipc://"):
            self._socket.setsockopt(zmq.SNDBUF, IPC_BUFFER_BYTES)
        else:
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TTL, 3 * HEARTBEAT_MS)  # So that the server forgets a dead host.
        own = KeyPair(connection.client_public, connection.client_secret)
        authenticate(self._socket, address, connection.server_key, own)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address!r} is no address: {zmq.strerror(error.errno or 0)}.") from None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._listener_ended)

    def next_id(self) -> p.RequestId:
        """An id that was never used."""
        self._sequence += 1
        return p.RequestId(self._name, self._sequence, 0)

    async def ask(self, request_id: bytes, request: p.Request, buffer: bytes | memoryview | None) -> p.Reply:
        """Send a request and wait for its reply, without a limit of its own. A `Failure` is raised as its error."""
        if self._failure:
            raise copy.copy(self._failure)
        frames: list[Any] = [request_id, p.encode(request)]
        pending = _Pending(frames if buffer is None else [*frames, buffer])
        self._refuse_too_big(request, pending)
        self._pending[request_id] = pending
        try:
            self._send(pending.frames)
            reply = await pending.reply
        finally:
            del self._pending[request_id]
        if isinstance(reply, Failure):
            raise from_failure(reply)
        return reply

    def cancel(self, request_id: bytes) -> None:
        """Tell the server that nobody waits for a reply any more."""
        self._send([self.next_id().pack(), p.encode(p.Cancel(request_id=request_id))])

    async def pause(self, seconds: float) -> None:
        """Wait for seconds, or less when the channel fails meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._failed.wait()

    def fail(self, error: BridgeError) -> None:
        """Raise error in every open question, and in every one to come."""
        self._failure = self._failure or error
        self._failed.set()
        for pending in self._pending.values():
            if not pending.reply.done():
                pending.reply.set_exception(copy.copy(error))

    async def close(self) -> None:
        """Stop listening; open questions raise PeerDied, and the server hears that nobody waits for them."""
        for request_id in self._pending:
            self.cancel(request_id)
        self.fail(PeerDied("The client was closed."))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=CLOSE_LINGER_MS if self.connected.is_set() else 0)

    def _send(self, frames: list[Any]) -> None:
        """Send, now or not at all: without a connection zmq queues, and what it loses is asked again."""
        if self._socket.closed:
            return
        sent = asyncio.ensure_future(
            self._socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=len(frames) < 3)  # A buffer is not copied.
        )
        error = sent.exception()
        if error and not isinstance(error, zmq.Again):
            raise error

    def _refuse_too_big(self, request: p.Request, pending: _Pending) -> None:
        for frame in pending.frames:
            if (size := memoryview(frame).nbytes) > self.max_bytes:
                adapter = "Train the model that the server serves, with a rank of at most its server.max_lora_rank."
                raise Refused(
                    f"{type(request).__name__} has {size} bytes; the server takes {self.max_bytes}.",
                    remedy=adapter if len(pending.frames) == 3 else "Ask for less at once.",
                )

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self.heard += 1
            if len(frames) == 2:
                self._take_in(*frames)
            await asyncio.sleep(0)  # A queue of replies is received without waiting: give way to everybody else.

    def _take_in(self, request_id: bytes, header: bytes) -> None:
        try:
            message = p.decode_to_client(header)
        except ProtocolMismatch as error:
            message = error
        if request_id:
            self._settle(request_id, message)  # type: ignore[arg-type]
            self._send([request_id, p.encode(p.Ack())])
        elif isinstance(message, p.Event):
            try:
                self._on_event(message)
            except Exception:  # Somebody else's code: whatever it does, replies must still come in.
                log.exception("on_event failed for %s", type(message).__name__)

    def _settle(self, request_id: bytes, outcome: p.Reply | BridgeError) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending.reply.done():
            return
        if isinstance(outcome, BridgeError):
            pending.reply.set_exception(outcome)
        else:
            pending.reply.set_result(outcome)

    async def _watch(self) -> None:
        """Follow the connection: ask everything again when it is back, give up when the server does not let us in."""
        broken = 0
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            match event:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    broken = 0
                    self.connected.set()
                    if self.was_connected:
                        self._ask_again()
                        self._on_return()
                    self.was_connected = True
                case zmq.EVENT_DISCONNECTED:
                    self.connected.clear()
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.fail(self._refused("refused this client's key"))
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self.fail(self._refused("does not accept this kind of connection"))
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    broken += 1  # Once or twice, this is a server that is just coming up or going down.
                    if broken == MAX_BROKEN_HANDSHAKES and not self.was_connected:
                        self.fail(self._refused("closes every connection before the handshake is over"))

    def _refused(self, what: str) -> Refused:
        return Refused(
            f"The server at {self.address} {what}.",
            why="Its keys are not those of the connection, or it runs as another user, or it is no tandem-server.",
            remedy="Use the connection file that this server wrote.",
        )

    def _ask_again(self) -> None:
        for pending in self._pending.values():
            if not pending.reply.done():
                self._send(pending.frames)

    def _listener_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            self.fail(BridgeError(f"The connection to {self.address} broke inside the client: {error!r}."))
