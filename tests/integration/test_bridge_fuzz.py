"""Tens of thousands of hostile messages: the server answers the honest, counts the malformed, and keeps nothing."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import zmq

from bridge import protocol as p
from bridge.client import BridgeClient
from bridge.endpoint import Connection
from bridge.errors import ProtocolMismatch
from bridge.security import new_keys
from bridge.server import SPARE_BYTES
from bridge_helpers import Raw, until
from hostile import Batch, batches, frames_of, outcome

FULL = os.environ.get("TANDEM_TEST_FULL") == "1"
SERVER = Path(__file__).parents[1] / "fuzzed_server.py"

GROWTH_BYTES = 8 << 20
"""The answers that the server keeps (1 MiB), and what an allocator does not give back."""

TOO_BIG = bytes((1 << 20) + SPARE_BYTES + 1)


@dataclass
class Target:
    """A server in a process of its own, an honest client of it, and what was done to it so far."""

    connection: Connection
    process: psutil.Process
    client: BridgeClient
    sent: int = 0
    dropped: int = 0
    mismatches: int = 0
    taken: int = 0
    sizes: list[int] = field(default_factory=list)

    async def dropped_frames(self) -> int:
        status = await self.client.ask(p.Status())
        assert isinstance(status, p.ServerStatus)
        return status.dropped_frames

    def raw(self, socket: str, name: bytes) -> Raw:
        raw = Raw(getattr(self.connection, socket), name)
        if self.connection.server_key:
            raw.socket.curve_serverkey = self.connection.server_key.encode()
            raw.socket.curve_publickey = self.connection.client_public.encode()
            raw.socket.curve_secretkey = self.connection.client_secret.encode()
        raw.socket.setsockopt(zmq.SNDHWM, 0)
        raw.socket.connect(raw.address)
        return raw

    async def take(self, batch: Batch) -> None:
        """Send a batch, and see that each of its messages came to what it should."""
        with contextlib.closing(self.raw(batch.socket, batch.name)) as raw:
            expected = {"taken": 0, "dropped": 0, "mismatch": 0}
            for message in batch.messages:
                frames = frames_of(message, batch.name)
                expected[outcome(batch.socket, batch.name, frames)] += 1
                await raw.send(*frames)
            if len(batch.name) == 16:
                assert await self._mismatches(raw, batch.socket) == expected["mismatch"], batch
            self.sent += len(batch.messages)
            self.taken += expected["taken"]
            self.mismatches += expected["mismatch"]
            self.dropped += expected["dropped"] + expected["mismatch"]
            async with asyncio.timeout(90):
                while await self.dropped_frames() < self.dropped:
                    pass
        assert await self.dropped_frames() == self.dropped, batch
        await self._make_noise(batch)

    async def _mismatches(self, raw: Raw, socket: str) -> int:
        """How often the server answered that it does not understand, up to now."""
        last = p.RequestId(raw.name, 1 << 60, 0).pack()
        await raw.send(last, p.encode(p.Score(token_ids=b"") if socket == "data" else p.Ping()))
        found = 0
        while (answer := await raw.receive())[0] != last:
            found += getattr(answer[1], "code", "") == ProtocolMismatch.code
        return found

    async def _make_noise(self, batch: Batch) -> None:
        place = getattr(self.connection, batch.socket).partition("://")[2]
        with contextlib.suppress(OSError):
            if self.connection.server_key:
                host, _, port = place.rpartition(":")
                _, writer = await asyncio.open_connection(host, int(port))
            else:
                _, writer = await asyncio.open_unix_connection(place)
            writer.write(batch.noise)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

    async def send_too_much(self) -> None:
        """A frame above the limit, which ends its connection and is no message."""
        for socket in ("data", "control"):
            with contextlib.closing(self.raw(socket, b"b" * 16)) as raw:
                monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                await raw.send(raw.next_id(), TOO_BIG)
                async with asyncio.timeout(90):
                    await monitor.recv_multipart()
                raw.socket.disable_monitor()
                monitor.close()

    async def serves_the_honest(self) -> None:
        prompt = os.urandom(20)
        answer = await self.client.ask(p.Generate(prompt=prompt))
        assert isinstance(answer, p.Generated)
        assert answer.completions[0].token_ids == prompt
        publish = p.PublishAdapter(version=self.sent, digest="", adapter_config={})
        loaded = await self.client.ask(publish, bytes(100_000))
        assert isinstance(loaded, p.AdapterLoaded)
        assert (loaded.version, loaded.nbytes) == (self.sent, 100_000)
        status = await self.client.ask(p.Status())
        assert isinstance(status, p.ServerStatus)
        assert status.in_use == {0: 0, 1: 1}  # This question itself.
        self.sizes.append(self.process.memory_info().rss)


@contextlib.asynccontextmanager
async def target(transport: str, folder: Path) -> AsyncIterator[Target]:
    """Ends well: nothing but its two addresses was printed, and no traceback."""
    tcp, own, keys = transport == "tcp", new_keys(), new_keys()
    errors = folder / "errors"
    with (
        errors.open("wb") as file,
        subprocess.Popen(  # noqa: ASYNC220 (it takes no time)
            [sys.executable, str(SERVER), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout
        about = {"tcp": tcp, "public": own.public, "secret": own.secret, "client": keys.public}
        process.stdin.write(json.dumps(about) + "\n")
        process.stdin.flush()
        data, control = json.loads(process.stdout.readline() or errors.read_text())
        found = {"server_key": own.public, "client_public": keys.public, "client_secret": keys.secret} if tcp else {}
        connection = Connection(data=data, control=control, server_uuid="uuid", pid=process.pid, **found)
        client = await BridgeClient.connect(connection)
        try:
            yield Target(connection, psutil.Process(process.pid), client)
        finally:
            await client.close()
            process.stdin.close()
            try:
                process.wait(20)
            finally:
                process.kill()
    assert process.returncode == 0
    assert not errors.read_text()


@pytest.mark.parametrize(
    ("transport", "count"),
    [
        ("ipc", 3000),
        ("tcp", 1000),
        *[
            pytest.param(
                transport,
                count,
                marks=[
                    pytest.mark.slow,
                    pytest.mark.timeout(3600),
                    pytest.mark.skipif(not FULL, reason="takes minutes: set TANDEM_TEST_FULL=1"),
                ],
            )
            for transport, count in (("ipc", 100_000), ("tcp", 10_000))
        ],
    ],
)
async def test_hostile_messages_are_counted_and_nothing_else_comes_of_them(tmp_path, transport, count):
    async with target(transport, tmp_path) as it:
        await it.serves_the_honest()
        await it.send_too_much()
        before = it.process.num_fds()
        number = 0
        while it.sent < count:
            number += 1
            for batch in batches(number):
                await it.take(batch)
            await it.serves_the_honest()
        await it.send_too_much()
        await it.serves_the_honest()
        assert await it.dropped_frames() == it.dropped
        await until(lambda: it.process.num_fds() <= before, "the connections of those who left to be closed")
        settled = it.sizes[max(2, len(it.sizes) // 10)]
        assert it.sizes[-1] - settled < GROWTH_BYTES
        assert min(it.taken, it.mismatches, it.dropped - it.mismatches) > count / 20
