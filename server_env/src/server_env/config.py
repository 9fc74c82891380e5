"""What the user means, said once for every engine: `[server]` in TOML, and the file that tandem-server reads."""

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from bridge.errors import ConfigError
from bridge.setting_words import Words, keys, words
from bridge.settings import decode_dict, decode_toml
from server_env.engines.sglang import SGLangConfig
from server_env.engines.vllm import VLLMConfig

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Intents that every engine knows under a name of its own. None: the engine's default.

    Where `[vllm]` or `[sglang]` sets the engine's own option for the same thing, that one wins.
    """

    backend: Literal["vllm", "sglang"] = "vllm"
    """The engine that samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: what the torch of this environment was built for. A run of the trainer: as it is placed."""
    model: str = ""
    """A folder or a hub name. A run of the trainer: model.name. Without a trainer it has to be set."""
    tokenizer: str = ""
    """A folder or a hub name. Empty: the model's own."""
    trust_remote_code: bool = False
    """Run the Python that comes with the model, as you. A run of the trainer: model.trust_remote_code."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the base weights, and what is computed in. auto: the engine's choice. A run of the trainer: model.dtype."""
    seed: Natural = 0
    """Of the engine's random numbers. A run of the trainer: its seed."""
    context_length: Annotated[int, msgspec.Meta(ge=2)] | None = None
    """Tokens of prompt and completion together. None: the model's own. A run of the trainer: model.max_seq_length."""
    memory_share: Share | None = None
    """Part of each GPU's memory that the engine may take in all: 0.5 is half of all there is, free or not. None: what
    it chooses itself. A run of the trainer: what the placement leaves, which `--check` prints. GPU only.
    """
    cpu_kv_gib: Count = 2
    """GiB of main memory for the KV cache. CPU only."""
    prefix_cache: bool = True
    """Keep the KV cache of a prompt for requests that begin alike, such as the completions of one group."""
    chunked_prefill: bool = True
    """Read long prompts in pieces, between which other requests go on."""
    cuda_graphs: bool = True
    """Record the GPU's work and play it back: faster steps for a longer start. False: none of it, which for vLLM leaves
    out torch.compile as well, on a CPU too.
    """
    max_sequences: Count | None = None
    """Sequences that the engine decodes at once; others wait."""
    tensor_parallel: Count = 1
    """GPUs that one engine computes on together. A run of the trainer: the server's GPUs, divided by data_parallel."""
    data_parallel: Count = 1
    """Engines, each on GPUs of its own; requests go to the least busy one."""
    nnodes: Count = 1
    """Machines that one engine spreads over. Each runs tandem-server with this file and a --node-rank of its own."""
    node_rank: Natural = 0
    """Which of them this is. The first, 0, is the one that the trainer talks to."""
    dist_init_addr: str = ""
    """`host:port` of the first node, at which the engine's processes of all nodes meet."""
    sleep: bool = False
    """Able to give GPU memory back between rollouts. A run of the trainer: true in time-share. GPU only."""
    metrics: bool = True
    """Have the engine keep Prometheus figures; vLLM keeps them in any case."""

    max_lora_rank: Count = 16
    """The largest rank of an adapter that is served. A run of the trainer: lora.r."""
    max_staleness: Natural = 1
    """Adapter versions behind the newest that stay servable. A run of the trainer: rollout.max_staleness."""
    adapter_slots: Count | None = None
    """Versions that can share a batch. None: max_staleness + 2 (one is being loaded)."""
    adapters_held: Count | None = None
    """Versions kept in main memory. None: twice the slots, and two."""

    max_in_flight: Count = 4096
    """Groups and scores being worked on; past it a client waits."""
    startup_timeout_s: Positive = 900.0
    """Seconds for one start of the engine, with the download and compilation that it may need; then it has failed."""
    load_timeout_s: Positive = 120.0
    """Seconds for an engine to load one adapter; past it the publish fails."""
    stall_timeout_s: Positive = 120.0
    """An engine that has work and makes no progress for so many seconds is restarted. A run of the trainer: a third of
    rollout.timeout_s, at most 300, and at least load_timeout_s.
    """
    spool_dir: str = ""
    """Where adapter files lie while the engine reads them. Empty: /dev/shm if it has room, else the run directory.
    With several nodes: a folder that all of them see.
    """
    engine_command: tuple[str, ...] = ()
    """A command in place of the engine's own, which gets the same flags: for wrappers (numactl, nsys) and for tests."""
    engine_env: dict[str, str] = {}
    """Environment variables for the engine; over those that it inherits and those that Tandem sets."""

    run_id: str = ""
    """The one run that may take the lease; empty: any. A run of the trainer: its own."""
    lease_s: Positive = 15.0
    """Without a heartbeat for so many seconds the trainer is believed dead."""
    keep_server_s: float = 0.0
    """Seconds that the server outlives its trainer's lease, for the next trainer. Negative: until it is told to end."""
    attach_within_s: Positive = 120.0
    """Seconds that a server which is ready waits for its first trainer; keep_server_s where that is more. They do not
    run while the trainer lives that started the server.
    """
    listen: str = "ipc"
    """`ipc`, or `tcp://host:port` (encrypted; port 0: any free one)."""
    http: str = ""
    """A loopback `host:port` for people: the engine's OpenAI API and /metrics (port 0: any free one). Empty: none."""
    metrics_address: str = "ipc"
    """Where /metrics alone is: `ipc`, a Unix socket that only you can open; a loopback `host:port`, which Prometheus
    can ask, and so can every user of this host; or empty, nowhere."""

    @property
    def meeting_point(self) -> tuple[str | None, int | None]:
        """Host and port of dist_init_addr; None where it is empty."""
        host, _, port = self.dist_init_addr.rpartition(":")
        return host or None, int(port) if port else None

    @property
    def slots(self) -> int:
        """Versions that can share a batch."""
        return self.adapter_slots or self.max_staleness + 2

    @property
    def held(self) -> int:
        """Versions kept in main memory."""
        return self.adapters_held or 2 * self.slots + 2


class ServerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole of server.toml."""

    server: ServerConfig
    """What every engine knows."""
    vllm: VLLMConfig = VLLMConfig()
    """vLLM's own options, where it is the backend."""
    sglang: SGLangConfig = SGLangConfig()
    """SGLang's own options, where it is the backend."""

    @property
    def model(self) -> str:
        """What is served: the engine's own option, or else the intent."""
        return {"vllm": self.vllm.model, "sglang": self.sglang.model_path}[self.server.backend] or self.server.model


def load(path: Path, overrides: Sequence[str] = ()) -> ServerFile:
    """Read and check server.toml, with `key=value` overrides applied. Raises ConfigError."""
    return checked(decode_toml(path, ServerFile, overrides), str(path))


def all_words() -> list[Words]:
    """Every setting and section of server.toml in words."""
    return [words(ServerFile, key) for key in keys(ServerFile)]


def from_dict(data: dict[str, Any], source: str) -> ServerFile:
    """The same from plain data. Raises ConfigError."""
    return checked(decode_dict(data, ServerFile, source), source)


def checked(file: ServerFile, source: str) -> ServerFile:
    """What no single field can say. Raises ConfigError."""
    server = file.server
    if not file.model:
        raise ConfigError(f"{source}: server.model: is missing, and has no default.")
    if server.slots < server.max_staleness + 2:
        raise ConfigError(
            f"{source}: server.adapter_slots: {server.slots} are too few for max_staleness = {server.max_staleness}.",
            why="The newest version, the stale ones and the one that is being loaded are live at once.",
            remedy=f"Set server.adapter_slots to {server.max_staleness + 2} or more, or leave it out.",
        )
    if server.held <= server.slots:
        raise ConfigError(
            f"{source}: server.adapters_held: {server.held} must be above adapter_slots = {server.slots}.",
            why="An adapter that the engine drops is read from disk again at its next use.",
            remedy="Leave server.adapters_held out.",
        )
    if not server.listen.startswith("tcp://") and server.listen != "ipc":
        raise ConfigError(f"{source}: server.listen: expected 'ipc' or 'tcp://host:port', got {server.listen!r}.")
    if server.http:
        loopback(server.http, f"{source}: server.http")
    if server.metrics_address not in ("", "ipc"):
        loopback(server.metrics_address, f"{source}: server.metrics_address")
    if server.dist_init_addr and not re.fullmatch(r"\S+:\d{1,5}", server.dist_init_addr):
        raise ConfigError(
            f"{source}: server.dist_init_addr: expected host:port, got {server.dist_init_addr!r}.",
            remedy='The first node and a port that is free there, for example "10.0.0.1:29500".',
        )
    return file


def loopback(address: str, name: str) -> tuple[str, int]:
    """Host and port of an address that only this host reaches. name: what errors call it. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"{name}: expected host:port, got {address!r}.", remedy="For example 127.0.0.1:8000.")
    host = "127.0.0.1" if host in ("", "localhost") else host
    try:
        inside = ipaddress.ip_address(host).is_loopback
    except ValueError:
        inside = False
    if not inside:
        raise ConfigError(
            f"{name}: {host} is not a loopback address.",
            why="This port has no encryption and no password.",
            remedy="Use 127.0.0.1, and an SSH tunnel from elsewhere.",
        )
    return host, int(port)
