"""The messages between the two halves, and how they are packed. Read this first: it is the system in types.

A message on a socket is `[request id, header]` or `[request id, header, buffer]`. The header is one msgpack map: a
struct below, told apart by its `type` field. Fields may be added with defaults; unknown fields are ignored. Token ids
and logprobs are packed arrays inside the header; adapter bytes ride in the buffer frame without a copy. Events that the
server pushes have an empty request id.
"""

import sys
from array import array
from typing import Annotated, Literal, NamedTuple, TypeVar, Union

import msgspec

from bridge.errors import Failure, ProtocolMismatch

PROTOCOL_VERSION = 3

MAX_DATA_BYTES = 16 << 20
"""Largest frame on the data socket."""

MAX_CONTROL_BYTES = 4 << 30
"""Largest frame on any control socket: an adapter."""

TokenIds = bytes
"""Packed little-endian int32, one a token."""

Logprobs = bytes
"""Packed little-endian float32, one a token, natural logarithm."""

Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, kw_only=True):
    """Base of everything on the wire but `Failure`."""


class Request(Message, frozen=True, kw_only=True):
    """A message that gets exactly one reply. deadline_s: seconds from now after which no reply is wanted."""

    deadline_s: Seconds = 60.0
    epoch: int = 0
    """The lease under which this is asked; 0 before one is held."""


class Work(Request, frozen=True, kw_only=True):
    """What an engine has to do something for. Of its deadline_s only the time counts in which an engine serves: while
    all of them are being started again the server waits, and so does the client, for `Welcome.restart_s` at most.
    """


# ---- control socket: trainer → server, and the reply ---------------------------------------------------------------


class Hello(Request, frozen=True, kw_only=True):
    """First message of a client. run_id names the run whose lease is asked for; empty for an onlooker."""

    protocol: int = PROTOCOL_VERSION
    client: str = ""
    run_id: str = ""
    alone: bool = False
    """The lease is asked for under an epoch of its own: not while another process of the run holds it."""
    again: bool = False
    """The process that holds the lease begins anew, under another epoch: it goes back to an older version."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the engine can take. max_context and vocab_size in tokens; adapter_slots: versions live at once."""

    max_context: int
    max_lora_rank: int
    adapter_slots: int
    max_in_flight: int
    vocab_size: int = 0
    max_adapter_bytes: int = MAX_CONTROL_BYTES
    """Largest frame on this server's control socket."""


class Welcome(Message, frozen=True, kw_only=True):
    """Reply to `Hello`."""

    protocol: int
    server_uuid: str
    engine: str
    engine_version: str
    model: str
    capabilities: tuple[str, ...]
    limits: Limits
    version: int
    """Adapter version that serves now; 0 is the base model."""
    epoch: int
    lease_s: float
    """Seconds without a `Lease` after which the server believes its trainer dead; 0 for an onlooker."""
    log_path: str = ""
    restart_s: float = 0.0
    """Seconds for which the server may be without an engine before it gives up: see `Work`."""
    http_url: str = ""
    metrics_url: str = ""
    """As in `endpoint.Connection`."""


class Lease(Request, frozen=True, kw_only=True):
    """Heartbeat of the run that holds the server. Reply: `Pulse`. Either socket takes it; on data it waits behind no
    adapter, and finds room in a full server too.
    """

    ends: bool = False
    """The last one: the trainer goes and leaves the server to whoever comes next."""


class Ping(Request, frozen=True, kw_only=True):
    """Are you there? Reply: `Pulse`. Takes no lease."""


class Pulse(Message, frozen=True, kw_only=True):
    """Reply to `Lease` and `Ping`. engine_steps counts answers of the engine, so that *alive but stuck* shows.

    Of several engines: the state of the one that is best off, and sums. engines: how many answer.
    """

    version: int
    engine_steps: int
    in_flight: int
    engine: Literal["starting", "ready", "restarting", "failed"]
    restarts: int = 0
    engines: int = 1


class PublishAdapter(Work, frozen=True, kw_only=True):
    """A new adapter; the buffer holds its safetensors bytes. Reply: `AdapterLoaded`, once new requests use it."""

    version: int
    digest: str
    adapter_config: dict[str, object]
    """PEFT's adapter_config.json."""


class AdapterLoaded(Message, frozen=True, kw_only=True):
    """Reply to `PublishAdapter`, and an event for subscribers."""

    version: int
    name: str
    nbytes: int
    spool_s: float
    load_s: float
    alias_of: int = -1
    """The version with the very same bytes, when the engine had nothing to load; else -1."""


class Canary(Work, frozen=True, kw_only=True):
    """An adapter with a large effect that no request can name; the buffer holds its safetensors bytes. The server keeps
    it, and repeats it after each start of the engine and each wake, before it serves. Reply: `CanaryScored`.
    """

    digest: str
    adapter_config: dict[str, object]
    """PEFT's adapter_config.json."""
    rows: tuple[TokenIds, ...]
    """What to score. Joined, they are the prefix that is cached under the base model and then read under the canary."""


class CanaryScored(Message, frozen=True, kw_only=True):
    """Reply to `Canary`. base, adapted: untempered logprobs of each row's tokens but the first, without and with it.

    sampled: logprobs of some tokens as they were sampled over the cached prefix, at temperature 1; rescored: of the
    same tokens when they are scored, which bypasses the cache.
    """

    base: tuple[Logprobs, ...]
    adapted: tuple[Logprobs, ...]
    sampled: Logprobs
    rescored: Logprobs
    load_s: float


class Sleep(Work, frozen=True, kw_only=True):
    """Finish what is in flight, then give GPU memory back. Reply: `Slept`."""


class Wake(Work, frozen=True, kw_only=True):
    """Take GPU memory again. Reply: `Slept` with the seconds it took."""


class Slept(Message, frozen=True, kw_only=True):
    """Reply to `Sleep` and `Wake`."""

    seconds: float
    freed_bytes: int = 0


class Status(Request, frozen=True, kw_only=True):
    """Reply: `ServerStatus`."""


class ServerStatus(Message, frozen=True, kw_only=True):
    """What the server is doing, for people and tests."""

    engine: str
    engine_version: str
    engine_pid: int
    version: int
    loaded: tuple[int, ...]
    """Adapter versions that the engine holds."""
    in_use: dict[int, int]
    """Requests in flight by version."""
    restarts: int
    requests: int
    generated_tokens: int
    dropped_frames: int
    uptime_s: float
    engine_pids: tuple[int, ...] = ()
    """Of every engine, in order; 0 for one that does not run. engine_pid is the first that does."""


class Shutdown(Request, frozen=True, kw_only=True):
    """End the server and its engine. Reply: `Done`, then the server goes."""

    reason: str = ""


class Done(Message, frozen=True, kw_only=True):
    """Reply with nothing more to say."""


class Subscribe(Request, frozen=True, kw_only=True):
    """Send me events from now on. Reply: `Done`."""


# ---- data socket: trainer → server, and the reply ------------------------------------------------------------------


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to sample. Names as in vLLM and SGLang. temperature 0 is greedy."""

    temperature: float = 1.0
    max_tokens: int = 16
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Generate(Work, frozen=True, kw_only=True):
    """Sample n completions of one prompt, all under one adapter version of at least min_version. Reply: `Generated`.

    version pins an exact version instead (0: the base model); -1 takes the newest.
    """

    prompt: TokenIds
    n: int = 1
    sampling: Sampling = Sampling()
    min_version: int = 0
    version: int = -1


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sampled completion. logprobs: of the sampled tokens, at the sampling temperature. eos is part of the ids."""

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: Literal["stop", "length", "abort"]


class Generated(Message, frozen=True, kw_only=True):
    """Reply to `Generate`: the whole group."""

    version: int
    completions: tuple[Completion, ...]


class Score(Work, frozen=True, kw_only=True):
    """Logprobs of given tokens, untempered, under a version (-1: the newest). Reply: `Scored`."""

    token_ids: TokenIds
    version: int = -1


class Scored(Message, frozen=True, kw_only=True):
    """Reply to `Score`. logprobs: one for every token but the first."""

    version: int
    logprobs: Logprobs


class Cancel(Request, frozen=True, kw_only=True):
    """Stop a request that is in flight on this socket; its own reply is then a `Failure`. Reply: `Done`."""

    request_id: bytes


# ---- both sockets ---------------------------------------------------------------------------------------------------


class Ack(Message, frozen=True, kw_only=True):
    """Client → server, no reply: the answer to this request id arrived and need not be kept."""


# ---- events: server → subscribers ----------------------------------------------------------------------------------


class EngineDied(Message, frozen=True, kw_only=True):
    """An engine is gone; the server starts it again, unless it has given that up for good."""

    why: str
    log_tail: str = ""
    for_good: bool = False


class EngineRestarted(Message, frozen=True, kw_only=True):
    """An engine answers again, with the last adapter loaded."""

    version: int
    restarts: int
    seconds: float


class Stats(Message, frozen=True, kw_only=True):
    """Heartbeat event."""

    pulse: Pulse


DataRequest = Generate | Score | Cancel | Lease
ControlRequest = Hello | Lease | Ping | PublishAdapter | Canary | Sleep | Wake | Status | Shutdown | Subscribe | Cancel
Reply = Welcome | Pulse | AdapterLoaded | CanaryScored | Slept | ServerStatus | Done | Generated | Scored | Failure
Event = AdapterLoaded | EngineDied | EngineRestarted | Stats

_ToServer = Union[DataRequest, ControlRequest, Ack]  # noqa: UP007 (msgspec wants one flat union)
_ToClient = Union[Reply, Event]  # noqa: UP007

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_decode_to_server = msgspec.msgpack.Decoder(_ToServer)
_decode_to_client = msgspec.msgpack.Decoder(_ToClient)


def encode(message: Message | Failure) -> bytes:
    """A message as its header frame."""
    return _encoder.encode(message)


def decode_to_server(header: bytes | memoryview) -> DataRequest | ControlRequest | Ack:
    """A header frame from a client. Raises ProtocolMismatch for anything that is not of the protocol."""
    return _decode(_decode_to_server, header)


def decode_to_client(header: bytes | memoryview) -> Reply | Event:
    """A header frame from a server. Raises ProtocolMismatch for anything that is not of the protocol."""
    return _decode(_decode_to_client, header)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", header: bytes | memoryview) -> T:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolMismatch(
            f"A message is not of protocol version {PROTOCOL_VERSION}: {error}",
            why="The two halves were installed from different versions of Tandem, or the peer is not Tandem.",
            remedy="Run scripts/setup_envs.sh, which installs both halves from this checkout.",
        ) from None


class RequestId(NamedTuple):
    """Who asked, which question it is, and which try: together they name one answer for ever."""

    client: bytes
    """16 bytes, a uuid."""
    sequence: int
    attempt: int

    def pack(self) -> bytes:
        """26 bytes: client, sequence (8, big-endian), attempt (2, big-endian)."""
        return self.client + self.sequence.to_bytes(8, "big") + self.attempt.to_bytes(2, "big")


def pack_ids(values: list[int] | tuple[int, ...]) -> TokenIds:
    """Token ids as packed int32. Raises OverflowError beyond 32 bits."""
    return _little_endian(array("i", values)).tobytes()


def unpack_ids(data: TokenIds) -> list[int]:
    """The inverse of `pack_ids`. Raises ValueError when the bytes are no whole number of ids."""
    values = array("i")
    values.frombytes(data)
    return _little_endian(values).tolist()


def pack_logprobs(values: list[float]) -> Logprobs:
    """Logprobs as packed float32."""
    return _little_endian(array("f", values)).tobytes()


def unpack_logprobs(data: Logprobs) -> list[float]:
    """The inverse of `pack_logprobs`."""
    values = array("f")
    values.frombytes(data)
    return _little_endian(values).tolist()


def _little_endian(values: array) -> array:  # type: ignore[type-arg]
    if sys.byteorder == "big":
        values.byteswap()
    return values
