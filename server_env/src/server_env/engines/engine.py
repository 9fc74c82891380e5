"""What an engine must do. Two kinds of failure leave it: `EngineGone`, to be tried again, and `BridgeError`, final."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import aiohttp

from bridge.protocol import Completion, Sampling


class EngineGone(Exception):
    """The engine did not answer because it died, or is about to: the same question can be asked of the next one."""


class GpuMemory(NamedTuple):
    """Of one GPU, in bytes. free: by everybody's processes."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one life of the engine listens, and the folder for its short-lived files. Paths fit a Unix socket.

    port, key, admin_key: for an engine that can only listen on TCP, where the keys keep everybody else out. gpus: those
    that it may see, as that life begins; none where the driver says nothing of them.
    """

    socket: Path
    scratch: Path
    port: int = 0
    key: str = ""
    admin_key: str = ""
    gpus: tuple[GpuMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a running engine says about itself. max_context in tokens; capabilities were probed, not guessed."""

    version: str
    max_context: int
    capabilities: frozenset[str]


class Engine(Protocol):
    """One engine: its command line, and its HTTP calls once it runs. All calls raise EngineGone when it dies meanwhile.

    Adapter names: empty for the base model. Calls have no time limit of their own: the caller sets one, and a cancelled
    call frees what the engine holds for it.
    """

    name: str
    installed_version: str
    """As installed; the running one is in EngineFacts."""
    model: str
    max_lora_rank: int
    adapter_slots: int
    """Versions that can share a batch."""
    adapters_held: int
    """Versions loaded at once."""
    gpus: int
    """That one engine computes on, those of all nodes together."""
    node_rank: int
    """Which part of an engine on several nodes this is; 0 is the one that answers."""

    def command(self, endpoint: Endpoint) -> list[str]:
        """What to run. Raises EngineFailed when the GPUs have no room for it."""
        ...

    def environment(self, cache: Path, endpoint: Endpoint) -> Mapping[str, str]:
        """Variables for it, over the cleaned ones."""
        ...

    def private_files(self, endpoint: Endpoint) -> Mapping[Path, str]:
        """Files (0600) that its command line names, and that are deleted when it has read them."""
        ...

    async def connect(self, endpoint: Endpoint) -> None:
        """Forget the last life; from now on talk to this endpoint."""
        ...

    async def close(self) -> None:
        """Close all connections: requests in flight end with EngineGone."""
        ...

    async def probe(self) -> EngineFacts:
        """Ask it what it is, and for a token. Raises EngineGone while it is not up, EngineFailed when it is unfit."""
        ...

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> tuple[Completion, ...]:
        """N completions of one prompt. Raises Refused for what the engine does not take."""
        ...

    async def score(self, adapter: str, token_ids: Sequence[int]) -> list[float]:
        """Untempered logprobs of all tokens but the first."""
        ...

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a PEFT folder under a new name. Raises Refused when the engine will not have it."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget a name."""
        ...

    async def sleep(self) -> None:
        """Give device memory back. Nothing may be in flight."""
        ...

    async def wake_weights(self) -> None:
        """Take back what adapters need to be loaded."""
        ...

    async def wake(self) -> None:
        """Take back the rest."""
        ...

    def http(self) -> aiohttp.ClientSession:
        """Its HTTP API, for people. Raises EngineGone while there is none."""
        ...

    def people(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """Around a request of theirs that samples, whose JSON that is: waits until the engine can have it."""
        ...

    async def progress(self) -> float:
        """A number that grows while the engine works."""
        ...
