"""The server's two ROUTER sockets: what comes in is checked, answered once, bounded in number, size and time."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio

from bridge import protocol as p
from bridge.endpoint import IO_THREAD, refuse_live_owner
from bridge.errors import (
    BridgeError,
    Busy,
    ConfigError,
    Failure,
    PeerDied,
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
STOP_S = 5.0
SPARE_REPLIES = 1024
SPARE_BYTES = 256
"""More than CURVE adds to a frame: a socket that refuses one as too big says so to nobody, and drops the connection."""


@dataclass(frozen=True, slots=True)
class Call:
    """What came with a request besides its header. buffer: the raw frame of `PublishAdapter`, else None."""

    request_id: bytes
    client: bytes
    buffer: memoryview | None


Handler = Callable[[p.DataRequest | p.ControlRequest, Call], Awaitable[p.Reply]]
TimeLimit = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]
"""As asyncio.timeout."""


@dataclass(frozen=True, slots=True)
class BridgeLimits:
    """Bounds of one server. Counts of requests, sizes in bytes."""

    max_in_flight: int = 8192
    max_data_bytes: int = p.MAX_DATA_BYTES
    max_control_bytes: int = p.MAX_CONTROL_BYTES
    reply_bytes: int = 512 << 20


class BridgeServer:
    """Listens on a data and a control address and hands each request to handler, once.

    The handler's task is cancelled when the client says `Cancel` and when the request's deadline passes, which for
    `Work` is counted by work_timeout. A `BridgeError` it raises is the reply. `Ack`, `Cancel` and `Subscribe` are dealt
    with here and never reach it.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        data: str,
        control: str,
        keys: ServerKeys | None = None,
        limits: BridgeLimits | None = None,
        work_timeout: TimeLimit = asyncio.timeout,
    ) -> None:
        self.data = data
        self.control = control
        self.dropped_frames = 0
        self._handler = handler
        self._limits = limits or BridgeLimits()
        self._work_timeout = work_timeout
        self._context = zmq.asyncio.Context(io_threads=len(IO_THREAD))
        self._gatekeeper = Gatekeeper(self._context, keys)
        self._sockets: dict[str, _Socket] = {}
        self._subscribers: set[bytes] = set()
        self._receivers: list[asyncio.Task[None]] = []
        self._stop: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        """Data requests being worked on."""
        return len(self._sockets["data"].running) if self._sockets else 0

    async def start(self) -> None:
        """Bind both sockets and begin to answer. Raises ConfigError when an address is in use or not allowed."""
        try:
            self._gatekeeper.start()
            self.data = self._bind("data", self.data, self._limits.max_data_bytes, p.DataRequest | p.Ack)
            self.control = self._bind("control", self.control, self._limits.max_control_bytes, p.ControlRequest | p.Ack)
        except BaseException:
            await self.stop()
            raise
        self._receivers = [asyncio.create_task(self._receive(socket)) for socket in self._sockets.values()]
        for task in self._receivers:
            task.add_done_callback(_log_the_end)

    def push(self, event: p.Event) -> None:
        """Send an event to everybody who subscribed. One who does not read loses events, never holds up the others."""
        header = p.encode(event)
        for client in list(self._subscribers):
            self._send(self._sockets["control"], client, b"", header)

    async def stop(self) -> None:
        """Cancel what runs, let the last replies go out, close the sockets and remove their files.

        Called again, or cancelled, it is still done once, and to its end.
        """
        self._stop = self._stop or asyncio.create_task(self._shut_down(asyncio.current_task()))
        await asyncio.shield(self._stop)

    async def _shut_down(self, caller: "asyncio.Task[object] | None") -> None:
        running = [task for socket in self._sockets.values() for task in socket.running.values()]
        tasks = {*self._receivers, *running} - {caller}
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                log.error("a request did not end within %g s of being cancelled: %r", STOP_S, task)
        self._subscribers.clear()
        self._gatekeeper.stop()
        for socket in self._sockets.values():
            socket.close()
        await asyncio.to_thread(self._context.destroy, CLOSE_LINGER_MS)  # Blocks until the last replies are out.

    def _bind(self, name: str, address: str, max_bytes: int, accepts: object) -> str:
        refuse_live_owner(address)
        socket = self._context.socket(zmq.ROUTER)
        self._sockets[name] = owner = _Socket(name, socket, accepts, ReplyStore(self._limits.reply_bytes))
        socket.setsockopt(zmq.AFFINITY, IO_THREAD[name])
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes + SPARE_BYTES)
        socket.setsockopt(zmq.RCVHWM, self._limits.max_in_flight)
        # Above what one client can have in flight: whoever reads is never cut off, whoever does not costs this much.
        socket.setsockopt(zmq.SNDHWM, 2 * self._limits.max_in_flight + SPARE_REPLIES)
        self._gatekeeper.protect(socket, address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"Cannot listen on {address}: {zmq.strerror(error.errno or 0)}.",
                why="Another program holds the address." if error.errno == errno.EADDRINUSE else "",
                remedy="Choose another port, or 0 for any free one.",
            ) from None
        return owner.bound()

    async def _receive(self, socket: "_Socket") -> None:
        while True:
            frames = await socket.zmq.recv_multipart(copy=False)
            try:
                self._accept(socket, [frame.buffer for frame in frames])
            except Exception:  # Whatever this message is, the next one must be heard.
                self.dropped_frames += 1
                log.exception("a message on the %s socket was dropped", socket.name)
            await asyncio.sleep(0)  # A queue of messages is received without waiting: give way to everybody else.

    def _accept(self, socket: "_Socket", frames: list[memoryview]) -> None:
        """Look at one message: drop it, answer it, or begin to work on it."""
        if (
            not 3 <= len(frames) <= 4
            or len(frames[1]) != REQUEST_ID_BYTES
            or frames[0] != frames[1][:CLIENT_BYTES]  # Nobody asks, fetches or acknowledges in the name of another.
        ):
            self.dropped_frames += 1
            return
        client, request_id, header = bytes(frames[0]), bytes(frames[1]), bytes(frames[2])
        call = Call(request_id, client, frames[3] if len(frames) == 4 else None)
        try:
            message = _decode(socket, header, call)
            if isinstance(message, p.Ack):
                socket.replies.forget(request_id)
                return
            if not socket.replies.begin(request_id, header, call.buffer.nbytes if call.buffer else 0):
                self._answer_again(socket, call)
                return
            self._work(socket, message, call)
        except BridgeError as error:
            self.dropped_frames += isinstance(error, ProtocolMismatch)
            self._send(socket, client, request_id, p.encode(to_failure(error)))

    def _answer_again(self, socket: "_Socket", call: Call) -> None:
        reply = socket.replies.stored(call.request_id)
        if reply is not None:  # Otherwise it is still being worked on, and will be answered then.
            self._send(socket, call.client, call.request_id, reply)

    def _work(self, socket: "_Socket", message: p.DataRequest | p.ControlRequest, call: Call) -> None:
        full = len(socket.running) >= self._limits.max_in_flight
        if full and not isinstance(message, p.Cancel | p.Subscribe | p.Lease):
            socket.replies.abandon(call.request_id)
            raise Busy(f"The server works on {self._limits.max_in_flight} requests already.")
        task = asyncio.create_task(self._reply(socket, message, call))
        socket.running[call.request_id] = task
        task.add_done_callback(lambda task: self._finish(socket, call, task))

    def _finish(self, socket: "_Socket", call: Call, task: "asyncio.Task[bytes]") -> None:
        """Answer, from the done callback, which comes even for a task that was cancelled before its first step."""
        del socket.running[call.request_id]
        if task.cancelled():
            socket.replies.abandon(call.request_id)
            stopped = PeerDied("The server was stopped before it had answered.")
            reply = p.encode(to_failure(stopped if self._stop else BridgeError("The request was cancelled.")))
        else:
            reply = task.result()
            socket.replies.finish(call.request_id, reply)
        self._send(socket, call.client, call.request_id, reply)

    async def _reply(self, socket: "_Socket", message: p.DataRequest | p.ControlRequest, call: Call) -> bytes:
        name = type(message).__name__
        try:
            match message:
                case p.Cancel():
                    reply = self._cancel(socket, message.request_id, call)
                case p.Subscribe():
                    self._subscribers.add(call.client)
                    reply = p.Done()
                case _:
                    reply = await self._handled(message, call)
            return p.encode(reply)
        except BridgeError as error:
            return p.encode(to_failure(error))
        except Exception as error:  # The dispatch edge: whatever breaks in one request must not end the others.
            log.exception("%s failed", name)
            return p.encode(Failure("error", f"{name} failed inside the server: {error!a}.", remedy="See server.log."))

    async def _handled(self, message: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        limited = self._work_timeout if isinstance(message, p.Work) else asyncio.timeout
        deadline: asyncio.Timeout | None = None
        try:
            async with limited(message.deadline_s) as deadline:
                reply = await self._handler(message, call)
        except TimeoutError:
            if not (deadline and deadline.expired()):
                raise  # The handler's own, about something else.
            raise Timeout(
                f"The server did not finish {type(message).__name__} within {message.deadline_s:g} s."
            ) from None
        if not isinstance(reply, p.Reply):
            raise TypeError(f"the handler answered {type(reply).__name__}")
        return reply

    def _cancel(self, socket: "_Socket", target: bytes, call: Call) -> p.Done:
        if target[:CLIENT_BYTES] != call.client:
            raise Refused("Only the client that asked can cancel a request.")
        if task := socket.running.get(target):
            task.cancel()
        return p.Done()

    def _send(self, socket: "_Socket", client: bytes, request_id: bytes, header: bytes) -> None:
        """Send, now or not at all: a client that went, or does not read, asks again and gets the stored answer."""
        if socket.zmq.closed:
            return
        sent = asyncio.ensure_future(socket.zmq.send_multipart([client, request_id, header], flags=zmq.DONTWAIT))
        error = sent.exception()
        if isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
            self._subscribers.discard(client)  # It subscribes again when it comes back.
        elif error and not isinstance(error, zmq.Again):
            raise error


def _log_the_end(receiver: "asyncio.Task[None]") -> None:
    if not receiver.cancelled():
        log.critical("a socket is not listened to any more", exc_info=receiver.exception())


def _decode(socket: "_Socket", header: bytes, call: Call) -> p.DataRequest | p.ControlRequest | p.Ack:
    message = p.decode_to_server(header)
    if not isinstance(message, socket.accepts):  # type: ignore[arg-type]
        raise ProtocolMismatch(f"{type(message).__name__} does not belong on the {socket.name} socket.")
    if call.buffer is not None and not isinstance(message, p.PublishAdapter | p.Canary):
        raise ProtocolMismatch(f"{type(message).__name__} has no buffer.")
    return message


class _Socket:
    """One ROUTER and what belongs to it. accepts: the union of messages that may come in here."""

    def __init__(self, name: str, socket: zmq.asyncio.Socket, accepts: object, replies: ReplyStore) -> None:
        self.name = name
        self.zmq = socket
        self.accepts = accepts
        self.replies = replies
        self.running: dict[bytes, asyncio.Task[bytes]] = {}
        self._file: tuple[Path, int, int] | None = None

    def bound(self) -> str:
        """The address it got. Its file, when it has one, is ours from now on."""
        address = self.zmq.getsockopt_string(zmq.LAST_ENDPOINT)
        path = Path(address.removeprefix("ipc://"))
        if address.startswith("ipc://") and path.is_socket():
            self._file = path, path.stat().st_ino, path.stat().st_mtime_ns
        return address

    def close(self) -> None:
        """Let the last replies go out, and remove the file, unless another server has taken its place."""
        self.zmq.close(CLOSE_LINGER_MS)
        if self._file:
            path, *identity = self._file
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if [status.st_ino, status.st_mtime_ns] == identity:
                    path.unlink()
            self._file = None
