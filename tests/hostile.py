"""Hostile messages for the bridge, made up by hypothesis, and what the protocol says of each."""

import random
from typing import NamedTuple

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bridge import protocol as p
from bridge.errors import ProtocolMismatch

BATCH = 25
BATCHES = 20
"""Batches a round. A batch comes from one client, a round ends with a look at what the server keeps."""

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
    st.builds(p.PublishAdapter, version=NUMBERS, digest=st.text(max_size=9), adapter_config=st.just({"r": 4})),
    st.builds(p.Canary, digest=st.just("0"), adapter_config=st.just({}), rows=st.lists(BLOBS, max_size=3).map(tuple)),
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


# ---- what the protocol says of them ----------------------------------------------------------------------------------


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


def frames_of(message: tuple[bytes, ...], name: bytes) -> tuple[bytes, ...]:
    """A message as the client of that name sends it."""
    return tuple(name + frame[len(OWN) :] if frame.startswith(OWN) else frame for frame in message)
