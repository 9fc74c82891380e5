"""Tens of thousands of hostile messages: the server answers the honest, counts the malformed, and keeps nothing."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bridge import protocol as p
from bridge.client import BridgeClient
from bridge.endpoint import Connection
from bridge.errors import ProtocolMismatch
from bridge.security import new_keys
from bridge_helpers import Raw, until

FULL = os.environ.get("TANDEM_TEST_FULL") == "1"
SERVER = Path(__file__).parents[1] / "fuzzed_server.py"
BATCH = 25
BATCHES = 20
"""Batches a round. A batch comes from one client, a round ends with a look at what the server keeps."""

GROWTH_BYTES = 12 << 20
"""The answers that the server keeps (1 MiB), and what an allocator does not give back."""

TOO_BIG = bytes((1 << 20) + 1)
OWN = b"own"
"""Stands for the name of the client that sends the message, which is known when it is sent."""


def often(usual: st.SearchStrategy, times: int, *others: st.SearchStrategy) -> st.SearchStrategy:
    """The usual one so many times as often as each of the others."""
    return st.sampled_from([usual] * times + list(others)).flatmap(lambda strategy: strategy)


# ---- messages as they should be ------------------------------------------------------------------------------------

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.integers(-2, 20)
BLOBS = st.binary(max_size=40)
IDS = st.integers(0, 5).map(lambda number: OWN + p.RequestId(b"", number, 0).pack())
VALID = st.one_of(
    st.builds(p.Generate, prompt=BLOBS, n=NUMBERS, min_version=NUMBERS, deadline_s=st.floats(1, 60)),
    st.builds(p.Score, token_ids=BLOBS, version=NUMBERS),
    st.builds(p.Cancel, request_id=BLOBS),
    st.builds(p.Ack),
    st.builds(p.Hello, protocol=NUMBERS, client=st.text(max_size=9), run_id=st.text(max_size=9)),
    st.builds(p.Lease, epoch=NUMBERS, ends=st.booleans()),
    st.builds(p.Ping),
    st.builds(p.PublishAdapter, version=NUMBERS, sha256=st.text(max_size=9), adapter_config=st.just({"r": 4})),
    st.builds(p.Canary, sha256=st.just("0"), adapter_config=st.just({}), rows=st.lists(BLOBS, max_size=3).map(tuple)),
    st.builds(p.Sleep),
    st.builds(p.Shutdown, reason=st.text(max_size=9)),
    st.builds(p.Subscribe, deadline_s=st.floats(1e-9, 1e9)),
).map(p.encode)

# ---- headers as they should not be ---------------------------------------------------------------------------------


def mutated(header: bytes, rng: random.Random) -> bytes:
    """A header with a few bytes cut off, changed, put in, taken out or repeated."""
    data = bytearray(header)
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(data) + 1), rng.randint(1, 6)
        match rng.randrange(5):
            case 0:
                del data[at:]
            case 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                data[at:at] = rng.randbytes(size)
            case 3:
                del data[at : at + size]
            case 4:
                data[at:at] = data[at : at + size]
    return bytes(data)


VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TAGS = st.one_of(
    st.sampled_from(["Generate", "Score", "Cancel", "Ack", "Ping", "Subscribe", "PublishAdapter", "Hello"]),
    st.sampled_from(["", "generate", "Teleport", "Message", "Request", "Done", "Generated", "Failure", "EngineDied"]),
    VALUES,
)
FIELDS = st.sampled_from(["prompt", "n", "sampling", "version", "request_id", "deadline_s", "epoch", "type", "other"])
WRONG_TAGS = st.builds(
    lambda tag, fields: msgspec.msgpack.encode(fields | {"type": tag}),
    TAGS,
    st.dictionaries(FIELDS, VALUES, max_size=4),
)
HUGE_LENGTHS = st.builds(
    lambda field, mark, length, rest: (
        b"\x83\xa4type\xa8Generate" + msgspec.msgpack.encode(field) + mark + length.to_bytes(4, "big") + rest
    ),
    FIELDS,
    st.sampled_from([b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"]),  # bin, ext, str, array, map
    st.sampled_from([2**32 - 1, 2**31, 2**24, 2**16]),
    BLOBS,
)
DEEP = st.builds(
    lambda mark, depth: b"\x82\xa4type\xa8Generate\xa1x" + mark * depth,
    st.sampled_from([b"\x91", b"\x81\xa1x", b"\x81\x91"]),
    st.sampled_from([10, 1000, 50_000]),
)
LARGE = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.sampled_from([4096, 200_000]))
HEADERS = st.one_of(
    VALID,
    st.builds(mutated, VALID, st.integers(0, 2**32).map(random.Random)),
    st.binary(max_size=60),
    WRONG_TAGS,
    HUGE_LENGTHS,
    often(BLOBS, 3, DEEP, LARGE),
)
WRONG_IDS = st.one_of(
    BLOBS,
    st.binary(min_size=26, max_size=26),
    IDS.map(lambda whole: whole[:-1]),
    IDS.map(lambda whole: whole + b"x"),
)
MESSAGES = often(
    st.tuples(IDS, HEADERS),
    6,
    st.tuples(IDS, HEADERS, BLOBS),
    st.tuples(WRONG_IDS, HEADERS),
    st.lists(st.binary(max_size=30), min_size=1, max_size=6).map(tuple),
    st.builds(lambda frame, times: (frame,) * times, IDS | BLOBS, st.sampled_from([1, 4, 5, 60, 300])),
)


class Batch(NamedTuple):
    """Messages of one client. noise: bytes that another one sends without any zmq."""

    socket: str
    name: bytes
    messages: list[tuple[bytes, ...]]
    noise: bytes


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
NAMES = often(st.binary(min_size=16, max_size=16), 6, st.binary(min_size=1, max_size=40))
BATCHED = st.builds(
    Batch,
    st.sampled_from(["data", "control"]),
    NAMES.map(lambda name: (name[:1].strip(b"\0") or b"n") + name[1:]),  # zmq keeps the others for itself.
    st.lists(MESSAGES, min_size=BATCH, max_size=BATCH),
    st.builds(bytes.__add__, st.sampled_from([b"", GREETING]), st.binary(max_size=80)),
)


def batches(number: int) -> list[Batch]:
    """Those of a round: the same ones each time."""
    found: list[Batch] = []

    @seed(number)
    @settings(
        max_examples=BATCHES,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(BATCHED)
    def collect(batch: Batch) -> None:
        found.append(batch)

    collect()
    return found


# ---- what the server makes of them ---------------------------------------------------------------------------------


def outcome(socket: str, name: bytes, frames: tuple[bytes, ...]) -> str:
    """What the protocol says of a message: taken, dropped without a word, or answered with a mismatch."""
    if not 2 <= len(frames) <= 3 or len(frames[0]) != 26 or frames[0][:16] != name:
        return "dropped"
    try:
        message = p.decode_to_server(frames[1])
    except ProtocolMismatch:
        return "mismatch"
    belongs = isinstance(message, (p.DataRequest if socket == "data" else p.ControlRequest) | p.Ack)
    fits = len(frames) == 2 or isinstance(message, p.PublishAdapter | p.Canary)
    return "taken" if belongs and fits else "mismatch"


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
                frames = tuple(batch.name + one[3:] if one.startswith(OWN) else one for one in message)
                expected[outcome(batch.socket, batch.name, frames)] += 1
                await raw.send(*frames)
            if len(batch.name) == 16:
                assert await self._mismatches(raw, batch.socket) == expected["mismatch"], batch
            self.sent += len(batch.messages)
            self.taken += expected["taken"]
            self.mismatches += expected["mismatch"]
            self.dropped += expected["dropped"] + expected["mismatch"]
            async with asyncio.timeout(20):
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
                async with asyncio.timeout(20):
                    await monitor.recv_multipart()
                raw.socket.disable_monitor()
                monitor.close()

    async def serves_the_honest(self) -> None:
        prompt = os.urandom(20)
        answer = await self.client.ask(p.Generate(prompt=prompt))
        assert isinstance(answer, p.Generated)
        assert answer.completions[0].token_ids == prompt
        publish = p.PublishAdapter(version=self.sent, sha256="", adapter_config={})
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
