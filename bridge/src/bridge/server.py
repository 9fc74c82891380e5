"""The server's two ROUTER sockets: what comes in is checked, answered once, bounded in number, size and time."""

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from bridge import protocol as p
from bridge.endpoint import refuse_live_owner
from bridge.errors import (
    BridgeError,
    Busy,
    ConfigError,
    Failure,
    ProtocolMismatch,
    Refused,
    Timeout,
    to_failure,
)
from bridge.replies import ReplyStore
from bridge.security import Gatekeeper, ServerKeys

log = logging.getLogger(__name__)

CLIENT_BYTES = 16
REQUEST_ID_BYTES = 26
CLOSE_LINGER_MS = 1000


@dataclass(frozen=True, slots=True)
class Call:
    """What came with a request besides its header. buffer: the raw frame of `PublishAdapter`, else None."""

    request_id: bytes
    client: bytes
    buffer: memoryview | None


Handler = Callable[[p.DataRequest | p.ControlRequest, Call], Awaitable[p.Reply]]


@dataclass(frozen=True, slots=True)
class BridgeLimits:
    """Bounds of one server. Counts of requests, sizes in bytes."""

    max_in_flight: int = 8192
    max_data_bytes: int = 16 << 20
    max_control_bytes: int = 4 << 30
    reply_bytes: int = 512 << 20


class BridgeServer:
    """Listens on a data and a control address and hands each request to handler, once.

    The handler's task is cancelled when the client says `Cancel` and when the request's deadline passes. A
    `BridgeError` it raises is the reply. `Ack`, `Cancel` and `Subscribe` are dealt with here and never reach it.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        data: str,
        control: str,
        keys: ServerKeys | None = None,
        limits: BridgeLimits | None = None,
    ) -> None:
        self.data = data
        self.control = control
        self.dropped_frames = 0
        self._handler = handler
        self._limits = limits or BridgeLimits()
        self._context = zmq.asyncio.Context()
        self._gatekeeper = Gatekeeper(self._context, keys)
        self._sockets: dict[str, _Socket] = {}
        self._subscribers: set[bytes] = set()
        self._background: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Data requests being worked on."""
        return len(self._sockets["data"].running) if self._sockets else 0

    async def start(self) -> None:
        """Bind both sockets and begin to answer. Raises ConfigError when an address is in use or not allowed."""
        self._gatekeeper.start()
        try:
            self.data = self._bind("data", self.data, self._limits.max_data_bytes, p.DataRequest)
            self.control = self._bind("control", self.control, self._limits.max_control_bytes, p.ControlRequest)
        except BaseException:
            await self.stop()
            raise
        for socket in self._sockets.values():
            self._spawn(self._receive(socket))

    def push(self, event: p.Event) -> None:
        """Send an event to everybody who subscribed."""
        for client in self._subscribers:
            self._spawn(self._send(self._sockets["control"], client, b"", p.encode(event)))

    async def stop(self) -> None:
        """Cancel what runs, let the last replies go out, close the sockets and remove their files."""
        requests = [task for socket in self._sockets.values() for task in socket.running.values()]
        tasks = [*self._background, *requests]
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*(t for t in tasks if t is not asyncio.current_task()), return_exceptions=True)
        self._gatekeeper.stop()
        self._context.destroy(linger=CLOSE_LINGER_MS)
        for address in (self.data, self.control):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _bind(self, name: str, address: str, max_bytes: int, accepts: object) -> str:
        refuse_live_owner(address)
        socket = self._context.socket(zmq.ROUTER)
        self._sockets[name] = _Socket(name, socket, accepts, ReplyStore(self._limits.reply_bytes))
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.RCVHWM, self._limits.max_in_flight)
        socket.setsockopt(zmq.SNDHWM, 0)  # Replies are bounded by max_in_flight; a full pipe would drop one silently.
        self._gatekeeper.protect(socket, address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen on {address}: {os.strerror(error.errno or 0)}.",
                why="Another program holds the address." if error.errno == errno.EADDRINUSE else "",
                remedy="Choose another port, or 0 for any free one.",
            ) from None
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _spawn(self, coroutine: Awaitable[None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _receive(self, socket: "_Socket") -> None:
        while True:
            frames = await socket.zmq.recv_multipart(copy=False)
            self._accept(socket, [frame.buffer for frame in frames])

    def _accept(self, socket: "_Socket", frames: list[memoryview]) -> None:
        """Look at one message. Whatever it is, the loop goes on."""
        if not 3 <= len(frames) <= 4 or len(frames[1]) != REQUEST_ID_BYTES:
            self.dropped_frames += 1
            return
        client, request_id, header = bytes(frames[0]), bytes(frames[1]), bytes(frames[2])
        if client != request_id[:CLIENT_BYTES]:
            self.dropped_frames += 1
            return
        try:
            message = p.decode_to_server(header)
            if isinstance(message, p.Ack):
                socket.replies.forget(request_id)
                return
            if not isinstance(message, socket.accepts):  # type: ignore[arg-type]
                raise ProtocolMismatch(f"{type(message).__name__} does not belong on the {socket.name} socket.")
            if not socket.replies.begin(request_id, header):
                self._answer_again(socket, client, request_id)
                return
        except BridgeError as error:
            self.dropped_frames += isinstance(error, ProtocolMismatch)
            self._spawn(self._send(socket, client, request_id, p.encode(to_failure(error))))
            return
        buffer = frames[3] if len(frames) == 4 else None
        task = asyncio.create_task(self._work(socket, message, Call(request_id, client, buffer)))
        socket.running[request_id] = task
        task.add_done_callback(lambda _: socket.running.pop(request_id, None))

    def _answer_again(self, socket: "_Socket", client: bytes, request_id: bytes) -> None:
        reply = socket.replies.stored(request_id)
        if reply is not None:  # Otherwise it is still being worked on, and will be answered then.
            self._spawn(self._send(socket, client, request_id, reply))

    async def _work(self, socket: "_Socket", message: p.DataRequest | p.ControlRequest, call: Call) -> None:
        try:
            reply = await self._reply(socket, message, call)
        except asyncio.CancelledError:
            socket.replies.abandon(call.request_id)
            await self._send(
                socket, call.client, call.request_id, p.encode(Failure("error", "The request was cancelled."))
            )
            raise
        header = p.encode(reply)
        if isinstance(reply, Failure) and reply.code == Busy.code:
            socket.replies.abandon(call.request_id)
        else:
            socket.replies.finish(call.request_id, header)
        await self._send(socket, call.client, call.request_id, header)

    async def _reply(self, socket: "_Socket", message: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        if isinstance(message, p.Cancel):
            return self._cancel(socket, message.request_id, call)
        if isinstance(message, p.Subscribe):
            self._subscribers.add(call.client)
            return p.Done()
        return await self._handled(socket, message, call)

    async def _handled(self, socket: "_Socket", message: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        if len(socket.running) > self._limits.max_in_flight:
            return to_failure(Busy(f"The server works on {self._limits.max_in_flight} requests already."))
        name = type(message).__name__
        try:
            async with asyncio.timeout(message.deadline_s):
                return await self._handler(message, call)
        except BridgeError as error:
            return to_failure(error)
        except TimeoutError:
            return to_failure(Timeout(f"The server did not finish {name} within {message.deadline_s:g} s."))
        except Exception as error:  # The dispatch edge: whatever breaks in one request must not end the others.
            log.exception("%s failed", name)
            return Failure("error", f"{name} failed inside the server: {error!r}.", remedy="Look at server.log.")

    def _cancel(self, socket: "_Socket", target: bytes, call: Call) -> p.Reply:
        if target[:CLIENT_BYTES] != call.client:
            return to_failure(Refused("Only the client that asked can cancel a request."))
        if task := socket.running.get(target):
            task.cancel()
        return p.Done()

    async def _send(self, socket: "_Socket", client: bytes, request_id: bytes, header: bytes) -> None:
        try:
            await socket.zmq.send_multipart([client, request_id, header])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._subscribers.discard(client)  # Gone; a client that comes back asks again and gets the stored answer.


class _Socket:
    """One ROUTER and what belongs to it. accepts: the union of requests that may come in here."""

    def __init__(self, name: str, socket: zmq.asyncio.Socket, accepts: object, replies: ReplyStore) -> None:
        self.name = name
        self.zmq = socket
        self.accepts = accepts
        self.replies = replies
        self.running: dict[bytes, asyncio.Task[None]] = {}
