"""Who may not talk does not; who sends nonsense costs nothing; no secret is ever shown."""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from bridge import protocol as p
from bridge.client import BridgeClient
from bridge.endpoint import Connection
from bridge.errors import BridgeError, ConfigError, Refused
from bridge.security import KeyPair, ServerKeys, new_keys
from bridge.server import BridgeLimits, BridgeServer
from bridge_helpers import TRANSPORTS, Raw, World, generate, generated, new_world, until

EVERYWHERE = [
    "tcp://*:0",
    "tcp://0.0.0.0:0",
    "tcp://0:0",
    "tcp://00.0.0.0:0",
    "tcp://0x0:0",
    "tcp://[::]:0",
    "tcp://[0::0]:0",
    "tcp://[::ffff:0.0.0.0]:0",
    "tcp://:0",
]


@pytest.fixture(params=TRANSPORTS)
async def world(request, tmp_path) -> AsyncIterator[World]:
    async with new_world(request.param, tmp_path, BridgeLimits(max_data_bytes=1 << 20)) as world:
        yield world


@pytest.fixture
async def tcp(tmp_path) -> AsyncIterator[World]:
    async with new_world("tcp", tmp_path) as world:
        yield world


def changed(connection: Connection, **fields: str) -> Connection:
    return msgspec.structs.replace(connection, **fields)


async def handler(*_: object) -> p.Reply:
    raise AssertionError("nobody should get here")


# ---- addresses -----------------------------------------------------------------------------------------------------


async def test_tcp_without_keys_is_refused():
    server = BridgeServer(handler, data="tcp://127.0.0.1:0", control="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="never open"):
        await server.start()


@pytest.mark.parametrize("address", EVERYWHERE)
async def test_an_address_that_means_every_network_is_refused_however_it_is_spelled(address, tmp_path):
    keys = ServerKeys(new_keys(), frozenset())
    server = BridgeServer(handler, data=f"ipc://{tmp_path}/data", control=address, keys=keys)
    with pytest.raises(ConfigError, match="every network") as caught:
        await server.start()
    assert "Name the one address" in caught.value.remedy
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["inproc://x", "udp://127.0.0.1:1", "ws://127.0.0.1:0", "nonsense", ""])
async def test_a_transport_that_nobody_guards_is_refused(address):
    keys = ServerKeys(new_keys(), frozenset())
    with pytest.raises(ConfigError, match="expected an ipc:// or tcp://"):
        await BridgeServer(handler, data=address, control=address, keys=keys).start()


@pytest.mark.parametrize("field", ["server_key", "client_secret"])
async def test_a_client_never_talks_tcp_without_keys(tcp, field):
    with pytest.raises(ConfigError, match="no CURVE keys"):
        await BridgeClient.connect(changed(tcp.connection, **{field: ""}))


@pytest.mark.parametrize("field", ["server_key", "client_public", "client_secret"])
@pytest.mark.parametrize("key", ["short", "é" * 40, " " * 40])
async def test_a_key_that_is_none_is_a_config_error_that_does_not_show_it(tcp, field, key):
    with pytest.raises(ConfigError, match="CURVE key") as caught:
        await BridgeClient.connect(changed(tcp.connection, **{field: key}))
    assert tcp.client_keys.secret not in str(caught.value)


async def test_a_server_key_that_is_none_is_a_config_error():
    keys = ServerKeys(KeyPair("public", "secret-key"), frozenset())
    server = BridgeServer(handler, data="tcp://127.0.0.1:0", control="tcp://127.0.0.1:0", keys=keys)
    with pytest.raises(ConfigError, match="CURVE keys") as caught:
        await server.start()
    assert "secret-key" not in str(caught.value)


# ---- keys ----------------------------------------------------------------------------------------------------------


async def refused_promptly(connection: Connection) -> Refused:
    """Refused, and not the Timeout of somebody who waited."""
    with pytest.raises(Refused) as caught:
        await BridgeClient.connect(connection, timeout_s=300)
    assert "connection file" in caught.value.remedy
    return caught.value


async def test_a_client_whose_key_is_not_allowed_is_refused_promptly(tcp):
    other = new_keys()
    connection = changed(tcp.connection, client_public=other.public, client_secret=other.secret)
    assert "refused this client's key" in (await refused_promptly(connection)).what
    assert not tcp.handler.asked


async def test_a_client_with_a_stolen_public_key_is_refused_promptly(tcp):
    await refused_promptly(changed(tcp.connection, client_secret=new_keys().secret))
    assert not tcp.handler.asked


async def test_a_wrong_server_key_is_refused_promptly(tcp):
    error = await refused_promptly(changed(tcp.connection, server_key=new_keys().public))
    assert "keys are not those of the connection" in error.why
    assert not tcp.handler.asked


async def test_a_server_without_curve_is_refused_promptly(tcp):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind_to_random_port("tcp://127.0.0.1")
        address = router.getsockopt_string(zmq.LAST_ENDPOINT)
        await refused_promptly(changed(tcp.connection, data=address, control=address))


async def test_what_is_no_zmq_server_is_refused_promptly(tcp):
    web = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with web:
        address = f"tcp://127.0.0.1:{web.sockets[0].getsockname()[1]}"
        await refused_promptly(changed(tcp.connection, data=address, control=address))


async def test_a_client_without_curve_gets_nothing(tcp):
    raw = tcp.raw(null=True)
    with contextlib.suppress(zmq.Again):  # zmq gives such a connection up for good, perhaps before this is sent.
        await raw.socket.send_multipart([raw.next_id(), p.encode(generate("one"))], flags=zmq.DONTWAIT)
    good = await tcp.connect()
    assert await good.ask(generate("two")) == generated("two")
    assert await raw.hears_nothing(0.2)
    assert tcp.handler.prompts() == ["two"]


async def test_a_stopped_gatekeeper_lets_nobody_in(tcp):
    inside = await tcp.connect()
    assert await inside.ask(generate("before")) == generated("before")  # Now its data socket is inside as well.
    tcp.server._gatekeeper.stop()
    await refused_promptly(tcp.connection)
    assert await inside.ask(generate("one")) == generated("one")


async def test_a_gatekeeper_that_breaks_lets_nobody_in(tcp):
    def breaks(*_: object) -> bool:
        raise ZeroDivisionError

    tcp.server._gatekeeper._handler.credentials_providers["tandem"].callback = breaks
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)
    with pytest.raises(BridgeError):
        await BridgeClient.connect(tcp.connection, timeout_s=0.3)
    assert not tcp.handler.asked


async def test_every_domain_but_ours_is_refused(tcp):
    allowed = tcp.server._gatekeeper._handler.credentials_providers["tandem"]
    assert allowed.callback("tandem", tcp.client_keys.public.encode())
    assert not allowed.callback("other", tcp.client_keys.public.encode())


async def test_wrong_keys_do_not_disturb_who_is_inside(tcp):
    inside = await tcp.connect()
    other = new_keys()
    strangers = [tcp.raw(name=bytes([65 + number]) * 16, keys=other) for number in range(5)]
    for stranger in strangers:
        await stranger.send(stranger.next_id(), p.encode(generate("bad")))
    assert await inside.ask(generate("one")) == generated("one")
    assert tcp.handler.prompts() == ["one"]


# ---- other users ---------------------------------------------------------------------------------------------------

INTRUDER = """
import os, sys, zmq
from bridge import protocol as p
os.setgid(65534)
os.setuid(65534)
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.linger = 0
    socket.setsockopt(zmq.IDENTITY, b"i" * 16)
    socket.connect(sys.argv[1])
    socket.send_multipart([p.RequestId(b"i" * 16, 1, 0).pack(), p.encode(p.Generate(prompt=b"theirs"))])
    monitor = socket.get_monitor_socket()
    print("answered" if socket.poll(300) else "nothing")
    socket.disable_monitor()
    monitor.close()
"""


@pytest.fixture
def open_world_dir():
    """A directory that everybody can enter: the check of the peer's user has to do alone."""
    path = Path(tempfile.mkdtemp(prefix="tandem-open-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    path.rmdir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_gets_nothing_over_ipc(open_world_dir):
    async with new_world("ipc", open_world_dir) as world:
        for name in ("data", "control"):
            (open_world_dir / name).chmod(0o777)
        intruder = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INTRUDER, world.server.data, stdout=subprocess.PIPE
        )
        out, _ = await intruder.communicate()
        assert out == b"nothing\n"
        assert await (await world.connect()).ask(generate("ours")) == generated("ours")
        assert world.handler.prompts() == ["ours"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
async def test_another_user_is_told_promptly(open_world_dir):
    code = """
import asyncio, concurrent.futures.thread, os, sys
from bridge.client import BridgeClient
from bridge.endpoint import Connection
os.setgid(65534)
os.setuid(65534)
connection = Connection(data=sys.argv[1], control=sys.argv[2], server_uuid="", pid=int(sys.argv[3]))
try:
    asyncio.run(BridgeClient.connect(connection))
except Exception as error:
    print(type(error).__name__, error)
"""
    async with new_world("ipc", open_world_dir) as world:
        for name in ("data", "control"):
            (open_world_dir / name).chmod(0o777)
        intruder = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, world.server.data, world.server.control, str(os.getpid())),
            stdout=subprocess.PIPE,
        )
        async with asyncio.timeout(90):
            out, _ = await intruder.communicate()
        assert out.startswith(b"Refused")
        assert b"another user" in out


# ---- each other's requests -----------------------------------------------------------------------------------------


async def test_nobody_fetches_the_answer_to_anothers_question(world):
    victim, thief = world.raw(name=b"v" * 16), world.raw(name=b"t" * 16)
    request = victim.next_id(), p.encode(generate("secret"))
    await victim.send(*request)
    await victim.receive()
    await thief.send(*request)
    await until(lambda: world.server.dropped_frames == 1, "the theft is noticed")
    assert await thief.hears_nothing(0.1)
    assert world.handler.prompts() == ["secret"]


async def test_nobody_cancels_anothers_question(world):
    victim, thief = world.raw(name=b"v" * 16), world.raw(name=b"t" * 16)
    request_id = victim.next_id()
    await victim.send(request_id, p.encode(generate("hold")))
    await until(lambda: world.handler.now, "it is worked on")
    reply = await thief.ask(p.Cancel(request_id=request_id))
    assert reply.code == Refused.code
    world.handler.release.set()
    assert await victim.receive() == (request_id, generated("hold"))
    assert not world.handler.cancelled


async def test_nobody_acknowledges_in_the_name_of_another(world):
    victim, thief = world.raw(name=b"v" * 16), world.raw(name=b"t" * 16)
    request = victim.next_id(), p.encode(generate("one"))
    await victim.send(*request)
    await victim.receive()
    await thief.send(request[0], p.encode(p.Ack()))
    await until(lambda: world.server.dropped_frames == 1, "the attempt is noticed")
    await victim.send(*request)
    await victim.receive()
    assert world.handler.prompts() == ["one"]


async def test_a_client_cannot_guess_the_name_of_another(world):
    names = {(await world.connect())._name for _ in range(20)}
    assert len(names) == 20
    assert all(len(name) == 16 and name[0] for name in names)


# ---- secrets -------------------------------------------------------------------------------------------------------


def test_no_secret_is_in_the_repr_of_what_holds_it():
    pair = new_keys()
    connection = Connection(data="", control="", server_uuid="", pid=1, client_secret=pair.secret)
    for holder in (pair, ServerKeys(pair, frozenset([pair.public])), connection, [connection]):
        assert pair.secret not in repr(holder)
        assert pair.secret not in str(holder)


async def test_no_secret_is_in_any_log_line_or_error(tcp, caplog):
    caplog.set_level(logging.DEBUG)
    client = await tcp.connect(run_id="r", on_event=lambda _: None)
    await client.ask(generate("one"))
    with pytest.raises(BridgeError) as crashed:
        await client.ask(generate("crash"))
    refused = await refused_promptly(changed(tcp.connection, server_key=new_keys().public))
    await tcp.server.stop()
    shown = caplog.text + str(crashed.value) + str(refused) + repr(vars(client)) + repr(vars(tcp.server))
    for secret in (tcp.keys.secret, tcp.client_keys.secret):
        assert secret not in shown


# ---- nonsense ------------------------------------------------------------------------------------------------------

REQUEST = p.encode(generate("x"))
ID = p.RequestId(b"n" * 16, 1 << 40, 0).pack()

DROPPED = {
    "one frame": [ID],
    "an empty frame": [b""],
    "four frames": [ID, REQUEST, b"", b""],
    "a hundred frames": [ID] * 100,
    "an empty id": [b"", REQUEST],
    "a short id": [ID[:-1], REQUEST],
    "a long id": [ID + b"x", REQUEST],
    "the id of another": [b"o" + ID[1:], REQUEST],
    "an acknowledgement with a short id": [b"n", p.encode(p.Ack())],
}

ANSWERED = {
    "an empty header": [ID, b""],
    "a header that is no msgpack": [ID, b"\xc1" * 10],
    "a header of random bytes": [ID, os.urandom(100)],
    "half a header": [ID, REQUEST[:-3]],
    "an unknown message": [ID, msgspec.msgpack.encode({"type": "Teleport"})],
    "a reply": [ID, p.encode(p.Done())],
    "a message of the other socket": [ID, p.encode(p.Ping())],
    "a wrong field": [ID, msgspec.msgpack.encode({"type": "Generate", "prompt": 3})],
    "a negative deadline": [ID, msgspec.msgpack.encode({"type": "Generate", "prompt": b"", "deadline_s": -1})],
    "a deadline that is no number": [
        ID,
        msgspec.msgpack.encode({"type": "Generate", "prompt": b"", "deadline_s": float("nan")}),
    ],
    "deep nesting": [ID, b"\x82\xa4type\xa8Generate\xa1x" + b"\x91" * 100_000],
    "a list without end": [ID, b"\x82\xa4type\xa8Generate\xa1x\xdd\xff\xff\xff\xff"],
    "a buffer where there is none": [ID, REQUEST, b"buffer"],
}


@pytest.mark.parametrize("frames", DROPPED.values(), ids=DROPPED.keys())
async def test_a_malformed_message_is_dropped_and_counted(world, frames):
    raw = world.raw()
    await raw.send(*frames)
    assert await raw.ask(generate("next")) == generated("next")
    assert world.server.dropped_frames == 1


@pytest.mark.parametrize("frames", ANSWERED.values(), ids=ANSWERED.keys())
async def test_a_message_that_is_not_of_the_protocol_is_counted_and_answered_with_a_mismatch(world, frames):
    raw = world.raw()
    await raw.send(*frames)
    request_id, reply = await raw.receive()
    assert (request_id, reply.code) == (ID, "protocol-mismatch")
    assert world.server.dropped_frames == 1
    assert await raw.ask(generate("next")) == generated("next")


async def test_a_nameless_peer_is_dropped(world):
    raw = Raw(world.server.data, b"")
    world.stack.callback(raw.close)
    if not world.tcp:
        raw.socket.connect(raw.address)
        await raw.send(ID, REQUEST)
        await until(lambda: world.server.dropped_frames == 1, "it is counted")
    assert await (await world.connect()).ask(generate("next")) == generated("next")


async def test_a_frame_too_big_ends_only_the_connection_that_sent_it(world):
    inside = await world.connect()
    raw = world.raw()
    assert await raw.ask(generate("before")) == generated("before")
    monitor = raw.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    await raw.send(raw.next_id(), bytes((1 << 20) + 1000))
    async with asyncio.timeout(90):
        await monitor.recv_multipart()
    raw.socket.disable_monitor()
    monitor.close()
    assert await inside.ask(generate("inside")) == generated("inside")
    assert await raw.ask(generate("after")) == generated("after")


async def test_a_broken_accept_does_not_end_the_server(world, monkeypatch, caplog):
    def breaks(_header: bytes) -> None:
        raise MemoryError

    client, raw = await world.connect(), world.raw()
    with monkeypatch.context() as patched:
        patched.setattr(p, "decode_to_server", breaks)
        await raw.send(raw.next_id(), REQUEST)
        await until(lambda: world.server.dropped_frames, "it is counted")
    assert "MemoryError" in caplog.text
    assert await client.ask(generate("next")) == generated("next")


async def test_bytes_that_are_not_even_zmq_do_not_disturb_the_server(world):
    place = world.server.data.partition("://")[2]
    client = await world.connect()
    for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f" * 99):
        if world.tcp:
            host, _, port = place.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        else:
            reader, writer = await asyncio.open_unix_connection(place)
        with contextlib.suppress(OSError):
            writer.write(garbage)
            writer.write_eof()
            async with asyncio.timeout(90):
                await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert await client.ask(generate("next")) == generated("next")
