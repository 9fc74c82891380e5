"""A real bridge server whose handler tests steer, clients of it, and a wire between them that can be cut."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from bridge import protocol as p
from bridge.client import BridgeClient
from bridge.endpoint import Connection
from bridge.errors import BridgeError
from bridge.security import KeyPair, ServerKeys, new_keys
from bridge.server import BridgeLimits, BridgeServer, Call

TRANSPORTS = ["ipc", "tcp"]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Wait for what has no event of its own, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


def descriptors() -> int:
    """How many files, sockets and pipes this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def generate(prompt: str, deadline_s: float = 100.0) -> p.Generate:
    return p.Generate(prompt=prompt.encode(), deadline_s=deadline_s)


def generated(prompt: str) -> p.Generated:
    """What the handler answers to that prompt."""
    return p.Generated(version=1, completions=(p.Completion(prompt.encode(), b"", "stop"),))


class Handler:
    """Echoes prompts. `hold...` waits for release, `refuse` raises error, `crash` breaks; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[p.DataRequest | p.ControlRequest] = []
        self.calls: list[Call] = []
        self.cancelled: list[str] = []
        self.most_at_once = 0
        self.release = asyncio.Event()
        self.error: BaseException = BridgeError("No.")
        self.answers: dict[type, Any] = {}
        """By request type: what to answer, or to raise."""
        self.hang_on: type | None = None
        """The request type that waits for release."""
        self.lease_s = 30.0
        self.restart_s = 0.0
        self.max_in_flight = 256
        self.protocol = p.PROTOCOL_VERSION
        self.now = 0

    def prompts(self, start: str = "") -> list[str]:
        """Prompts of the Generate requests so far that begin like this."""
        texts = [one.prompt.decode() for one in self.asked if isinstance(one, p.Generate)]
        return [text for text in texts if text.startswith(start)]

    async def __call__(self, message: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        self.asked.append(message)
        self.calls.append(call)
        if type(message) is self.hang_on:
            await self.release.wait()
        answer = self.answers.get(type(message))
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        match message:
            case p.Hello():
                return self._welcome()
            case p.Generate():
                return await self._generate(message.prompt.decode())
            case p.PublishAdapter():
                assert call.buffer is not None
                return p.AdapterLoaded(
                    version=message.version, name="policy", nbytes=call.buffer.nbytes, spool_s=0, load_s=0
                )
            case p.Ping() | p.Lease():
                return p.Pulse(version=0, engine_steps=len(self.asked), in_flight=self.now, engine="ready")
        return p.Done()

    async def _generate(self, prompt: str) -> p.Reply:
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            if prompt.startswith("hold"):
                await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(prompt)
            raise
        finally:
            self.now -= 1
        if prompt == "refuse":
            raise self.error
        if prompt == "crash":
            raise ZeroDivisionError("a bug")
        return generated(prompt)

    def _welcome(self) -> p.Welcome:
        limits = p.Limits(max_context=64, max_lora_rank=8, adapter_slots=2, max_in_flight=self.max_in_flight)
        return p.Welcome(
            protocol=self.protocol,
            server_uuid="uuid",
            engine="fake",
            engine_version="1",
            model="model",
            capabilities=(),
            limits=limits,
            version=0,
            epoch=7,
            lease_s=self.lease_s,
            restart_s=self.restart_s,
        )


class World:
    """One server on one transport, and everything that a test opens against it."""

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport = transport
        self.folder = folder
        self.handler = Handler()
        self.keys = new_keys()
        self.client_keys = new_keys()
        self.stack = contextlib.AsyncExitStack()
        self.server: BridgeServer
        self.connection = Connection(data="", control="", server_uuid="", pid=0)
        self.pid = os.getpid()

    @property
    def tcp(self) -> bool:
        return self.transport == "tcp"

    @property
    def server_keys(self) -> ServerKeys | None:
        return ServerKeys(self.keys, frozenset([self.client_keys.public])) if self.tcp else None

    def new_server(self, data: str = "", control: str = "", limits: BridgeLimits | None = None) -> BridgeServer:
        """A server with this world's handler and keys; on new addresses unless they are given."""
        data = data or ("tcp://127.0.0.1:0" if self.tcp else f"ipc://{self.folder}/data")
        control = control or ("tcp://127.0.0.1:0" if self.tcp else f"ipc://{self.folder}/control")
        return BridgeServer(self.handler, data=data, control=control, keys=self.server_keys, limits=limits)

    async def start(self, limits: BridgeLimits | None = None) -> None:
        self.server = self.new_server(limits=limits)
        await self.server.start()
        self.stack.push_async_callback(self.server.stop)
        self.connection = self.connection_to(self.server.data, self.server.control)

    async def rebuild(self) -> None:
        """Tear the server's sockets down without a word to anybody, and bind new ones on the same addresses."""
        old = self.server
        tasks = [*old._receivers, *(task for socket in old._sockets.values() for task in socket.running.values())]
        old._subscribers.clear()
        old._gatekeeper.stop()
        for socket in old._sockets.values():
            socket.zmq.close(linger=0)
        await asyncio.to_thread(old._context.destroy)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.server = self.new_server(old.data, old.control)
        await self.server.start()
        self.stack.push_async_callback(self.server.stop)

    def connection_to(self, data: str, control: str) -> Connection:
        keys = {}
        if self.tcp:
            keys = {
                "server_key": self.keys.public,
                "client_public": self.client_keys.public,
                "client_secret": self.client_keys.secret,
            }
        return Connection(data=data, control=control, server_uuid="uuid", pid=self.pid, **keys)

    async def connect(self, connection: Connection | None = None, **options: Any) -> BridgeClient:
        client = await BridgeClient.connect(connection or self.connection, **{"timeout_s": 90, **options})
        self.stack.push_async_callback(client.close)
        return client

    async def wire(self) -> "Wire":
        """A connection to the server that can be cut."""
        wire = Wire(self)
        await wire.open()
        self.stack.push_async_callback(wire.close)
        return wire

    def raw(
        self, address: str = "", *, name: bytes = b"n" * 16, keys: KeyPair | None = None, null: bool = False
    ) -> "Raw":
        """A bare socket that speaks to the server. null: without any key."""
        raw = Raw(address or self.server.data, name)
        self.stack.callback(raw.close)
        if self.tcp and not null:
            keys = keys or self.client_keys
            raw.socket.curve_serverkey = self.keys.public.encode()
            raw.socket.curve_publickey = keys.public.encode()
            raw.socket.curve_secretkey = keys.secret.encode()
        raw.socket.connect(raw.address)
        return raw


class Raw:
    """A DEALER that sends whatever frames it is given."""

    def __init__(self, address: str, name: bytes) -> None:
        self.address = address
        self.name = name
        self.sequence = 0
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        if name:
            self.socket.setsockopt(zmq.IDENTITY, name)

    def next_id(self) -> bytes:
        self.sequence += 1
        return p.RequestId(self.name, self.sequence, 0).pack()

    async def send(self, *frames: bytes) -> None:
        async with asyncio.timeout(60):  # A socket whose connection zmq has given up would wait for ever.
            await self.socket.send_multipart(frames)

    async def receive(self, timeout_s: float = 90.0) -> tuple[bytes, p.Reply | p.Event]:
        async with asyncio.timeout(timeout_s):
            request_id, header = await self.socket.recv_multipart()
        return request_id, p.decode_to_client(header)

    async def ask(self, message: p.Message) -> p.Reply | p.Event:
        request_id = self.next_id()
        await self.send(request_id, p.encode(message))
        answered, reply = await self.receive()
        assert answered == request_id
        return reply

    async def hears_nothing(self, seconds: float) -> bool:
        return not await self.socket.poll(int(seconds * 1000))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Wire:
    """Forwards bytes to the server's two sockets. `cut` drops what is connected, `lower` lets nobody in either."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._servers: list[asyncio.Server] = []
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = {"data": asyncio.Event(), "control": asyncio.Event()}
        self.flow()
        self.connection = world.connection
        self.connections = 0
        self.drops = False

    async def open(self) -> None:
        addresses = []
        before = (self.connection.data, self.connection.control) if self._tasks else ("", "")
        for name, old in zip(("data", "control"), before, strict=True):
            serve = self._serve(getattr(self._world.connection, name), self._flows[name])
            if self._world.tcp:
                port = int(old.rpartition(":")[2]) if old else 0
                server = await asyncio.start_server(serve, "127.0.0.1", port)
                addresses.append(f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            else:
                path = self._world.folder / f"wire-{name}"
                path.unlink(missing_ok=True)
                server = await asyncio.start_unix_server(serve, path)
                addresses.append(f"ipc://{path}")
            self._servers.append(server)
        self.connection = self._world.connection_to(*addresses)

    def cut(self) -> None:
        """Break every connection. New ones are welcome."""
        for end in self._ends:
            end.transport.abort()

    def lower(self) -> None:
        """Break every connection and let nobody in, until `open`."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self.cut()

    def stall(self, *names: str) -> None:
        """Keep every connection, and forward nothing to and from those sockets, or any, until `flow`."""
        for name in names or self._flows:
            self._flows[name].clear()

    def flow(self) -> None:
        for flows in self._flows.values():
            flows.set()

    async def close(self) -> None:
        self.lower()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _serve(self, address: str, flows: asyncio.Event) -> Callable[..., None]:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            if self.drops:
                writer.close()
                return
            self._tasks.add(asyncio.create_task(self._forward(address, flows, reader, writer)))

        return serve

    async def _forward(
        self, address: str, flows: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        scheme, _, place = address.partition("://")
        if scheme == "tcp":
            host, _, port = place.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        else:
            far_reader, far_writer = await asyncio.open_unix_connection(place)
        ends = {writer, far_writer}
        self._ends |= ends
        try:
            pairs = ((reader, far_writer), (far_reader, writer))
            pumps = [asyncio.create_task(self._pump(flows, *pair)) for pair in pairs]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    async def _pump(self, flows: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await flows.wait()
                writer.write(data)
                await writer.drain()


@contextlib.asynccontextmanager
async def new_world(transport: str, folder: Path, limits: BridgeLimits | None = None) -> AsyncIterator[World]:
    """A world with its server started; everything is closed at the end, the last opened first."""
    world = World(transport, folder)
    async with world.stack:
        await world.start(limits)
        yield world
        world.handler.release.set()
