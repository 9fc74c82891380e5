"""What goes over the wire comes back whole, and nothing that comes over the wire can break a decoder."""

import contextlib
import struct
import types
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import protocol as p
from bridge.errors import Failure, ProtocolMismatch

TO_SERVER = [*typing.get_args(p.DataRequest), *typing.get_args(p.ControlRequest), p.Ack]
TO_CLIENT = [*typing.get_args(p.Reply), *typing.get_args(p.Event)]

INTS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
LEAVES = {
    int: INTS,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=40),
    object: JSON,
    types.NoneType: st.none(),
}


def values(type_) -> st.SearchStrategy:  # noqa: PLR0911 (one case a kind of type)
    """Values of a field's type, as the wire allows them."""
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if type_ == p.Seconds:
        return st.floats(0, exclude_min=True, allow_nan=False)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(*map(values, arguments), max_size=3)
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        hints = typing.get_type_hints(type_, include_extras=True)
        return st.builds(type_, **{name: values(hints[name]) for name in type_.__struct_fields__})
    return LEAVES[type_]


@pytest.mark.parametrize("type_", TO_SERVER, ids=lambda type_: type_.__name__)
def test_every_message_to_the_server_comes_back_whole(type_):
    @given(values(type_))
    def comes_back(message):
        assert p.decode_to_server(p.encode(message)) == message

    comes_back()


def test_every_request_has_a_deadline_unless_it_is_taken_away():
    requests = [type_ for type_ in TO_SERVER if issubclass(type_, p.Request)]
    assert len(requests) == len(TO_SERVER) - 1  # An acknowledgement has no reply.
    for type_ in requests:
        (deadline,) = [field.default for field in msgspec.structs.fields(type_) if field.name == "deadline_s"]
        assert 0 < deadline <= 600, type_


@pytest.mark.parametrize("type_", TO_CLIENT, ids=lambda type_: type_.__name__)
def test_every_message_to_the_client_comes_back_whole(type_):
    @given(values(type_))
    def comes_back(message):
        assert p.decode_to_client(p.encode(message)) == message

    comes_back()


def test_every_message_struct_travels_in_some_direction():
    on_the_wire = {*TO_SERVER, *TO_CLIENT}
    structs = {
        value
        for value in vars(p).values()
        if isinstance(value, type) and issubclass(value, p.Message) and value not in (p.Message, p.Request, p.Work)
    }
    assert structs | {Failure} == on_the_wire


def test_the_header_names_its_type():
    assert msgspec.msgpack.decode(p.encode(p.Ping()))["type"] == "Ping"


def test_a_memoryview_decodes_like_bytes():
    assert p.decode_to_server(memoryview(p.encode(p.Ping()))) == p.Ping()


@given(st.dictionaries(TEXT.filter(lambda key: key not in ("type", "deadline_s", "epoch")), JSON, max_size=3))
def test_fields_added_by_a_newer_version_are_ignored(added):
    header = msgspec.msgpack.encode({"type": "Lease", "epoch": 7, **added})
    assert p.decode_to_server(header) == p.Lease(epoch=7)


def test_fields_missing_from_an_older_version_take_their_defaults():
    assert p.decode_to_server(msgspec.msgpack.encode({"type": "Ping"})) == p.Ping()


@pytest.mark.parametrize("decode", [p.decode_to_server, p.decode_to_client])
def test_an_unknown_type_is_a_mismatch_with_a_remedy(decode):
    with pytest.raises(ProtocolMismatch, match="protocol version") as caught:
        decode(msgspec.msgpack.encode({"type": "Teleport"}))
    assert "setup_envs" in caught.value.remedy


def test_a_message_in_the_wrong_direction_is_a_mismatch():
    with pytest.raises(ProtocolMismatch):
        p.decode_to_server(p.encode(p.Done()))
    with pytest.raises(ProtocolMismatch):
        p.decode_to_client(p.encode(p.Ping()))


@given(st.binary(max_size=300))
def test_garbage_is_a_mismatch(garbage):
    for decode in (p.decode_to_server, p.decode_to_client):
        with pytest.raises(ProtocolMismatch):
            decode(garbage)


@given(st.data())
def test_a_damaged_message_is_a_mismatch_or_another_message(data):
    whole = bytearray(p.encode(p.PublishAdapter(version=3, digest="ab", adapter_config={"r": 8, "modules": ["q"]})))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(ProtocolMismatch):
        assert isinstance(p.decode_to_server(damaged), msgspec.Struct)


def publish(config: bytes) -> bytes:
    """A PublishAdapter whose adapter_config is raw msgpack."""
    fields = {"type": "PublishAdapter", "version": 1, "digest": ""}
    packed = b"".join(msgspec.msgpack.encode(part) for item in fields.items() for part in item)
    return b"\x84" + packed + msgspec.msgpack.encode("adapter_config") + config


KEY = b"\x81\xa1k"

HOSTILE = {
    "nothing": b"",
    "nested without end": publish(KEY + b"\x91" * 100_000),
    "maps nested without end": publish(KEY * 100_000),
    "nested under an unknown field": b"\x82\xa4type\xa4Ping\xa1x" + b"\x91" * 100_000,
    "nested before the type is known": b"\x82\xa1x" + b"\x91" * 100_000,
    "a list said to have 4 G elements": publish(KEY + b"\xdd\xff\xff\xff\xff"),
    "a map said to have 4 G entries": publish(b"\xdf\xff\xff\xff\xff"),
    "a text said to have 4 GiB": publish(KEY + b"\xdb\xff\xff\xff\xff"),
    "a map as a key": publish(KEY + b"\x81\x81\x01\x02\x03"),
    "a text that is no utf-8": publish(KEY + b"\xa2\xff\xfe"),
    "a key that is no utf-8": publish(b"\x81\xa2\xff\xfe\x01"),
    "a timestamp out of range": publish(KEY + b"\xd7\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    "a type that is no text": b"\x81\xa4type\x03",
    "a deadline that is no number": msgspec.msgpack.encode({"type": "Ping", "deadline_s": float("nan")}),
    "a deadline in the past": msgspec.msgpack.encode({"type": "Ping", "deadline_s": -1}),
    "a deadline of zero": msgspec.msgpack.encode({"type": "Ping", "deadline_s": 0}),
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_header_is_a_mismatch(header):
    with pytest.raises(ProtocolMismatch):
        p.decode_to_server(header)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_come_back_whole(ids):
    packed = p.pack_ids(ids)
    assert p.unpack_ids(packed) == ids
    assert packed == struct.pack(f"<{len(ids)}i", *ids)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_come_back_whole(logprobs):
    packed = p.pack_logprobs(logprobs)
    assert p.unpack_logprobs(packed) == logprobs
    assert packed == struct.pack(f"<{len(logprobs)}f", *logprobs)


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_an_id_beyond_32_bits_is_refused(token):
    with pytest.raises(OverflowError):
        p.pack_ids([token])


@pytest.mark.parametrize("unpack", [p.unpack_ids, p.unpack_logprobs])
def test_bytes_that_are_no_whole_number_of_tokens_are_refused(unpack):
    with pytest.raises(ValueError, match="multiple of item size"):
        unpack(b"\x00" * 7)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1))
def test_a_request_id_has_26_bytes_that_tell_all_its_parts(client, sequence, attempt):
    packed = p.RequestId(client, sequence, attempt).pack()
    assert len(packed) == 26
    assert struct.unpack(">16sQH", packed) == (client, sequence, attempt)
