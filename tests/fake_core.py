"""What a fake engine knows and does, in nobody's words; see fake_engine.py.

Tokens and logprobs come from a hash of the adapter's bytes and the last tokens: same question, same answer, and another
adapter gives other answers. TANDEM_FAKE_FAULT says how to misbehave: faults separated by commas, each
`name[:argument][@life][#engine]`; `@1` limits one to an engine's first life, `#1` to the second of a server's engines.
TANDEM_FAKE_JOURNAL names a file that gets a JSON line for each thing that happened.

Faults: dies-at-start, never-listens, port-clash, slow-start:SECONDS, starts-when:FILE (exists), no-route:ROUTE,
old-logprobs, ignores-sigterm, has-child, flat (every token is as likely as any other); on generation: dies, hangs,
freezes (the whole process), answers-500, drops-connection, shifts-logprobs, other-model (vLLM), holds:FILE (answers
when FILE exists), abort-holds:FILE (SGLang: what is cancelled ends when FILE exists); on loading: load-500, load-400,
load-hangs, load-holds:FILE, load-dies, unlisted, ignores-adapter, drops-module:NAME; on unloading: unload-hangs;
always: other-base (another base model), stale-cache (what was sampled over a prompt is sampled over it again, under
whatever adapter). An argument FILE of other-base or ignores-adapter makes the fault begin when FILE exists.
"""

import asyncio
import hashlib
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

EOS = 2
VOCAB = 512
POLL_S = 0.01


def faults(listens_at: str) -> dict[str, str]:
    """Faults of this life of this engine, by name, with their arguments. Which that is says where it listens."""
    found = {}
    path = re.search(r"(?:/(\d+))?/(\d+)/engine\.\w+$", listens_at)
    engine, life = (path[1] or "0", path[2]) if path else ("0", "1")
    for word in filter(None, os.environ.get("TANDEM_FAKE_FAULT", "").split(",")):
        plain, _, only_engine = word.partition("#")
        plain, _, only_life = plain.partition("@")
        name, _, argument = plain.partition(":")
        if only_life in ("", life) and only_engine in ("", engine):
            found[name] = argument
    return found


class Ask(NamedTuple):
    """How to sample."""

    max_tokens: int
    temperature: float
    top_k: int = 0
    seed: int | None = None
    stop: tuple[int, ...] = ()
    ignore_eos: bool = False


class Sampled(NamedTuple):
    """One completion."""

    ids: list[int]
    logprobs: list[float]
    finish: str


class Unloadable(Exception):
    """An adapter that the engine will not have: the status code and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Fake:
    """The engine's state. max_context in tokens; max_loaded: adapters."""

    max_context: int
    max_rank: int
    max_loaded: int
    faults: dict[str, str]
    adapters: dict[str, bytes] = field(default_factory=dict)
    generation_tokens: int = 0
    prompt_tokens: int = 0
    asleep: set[str] = field(default_factory=set)
    cache: dict[tuple[int, ...], bytes] = field(default_factory=dict)
    """By prompt: the adapter under which it was read."""

    def begun(self, fault: str) -> bool:
        """Whether a fault that may wait for a file is there by now."""
        return fault in self.faults and (not self.faults[fault] or Path(self.faults[fault]).exists())

    def identity(self, adapter: str) -> bytes:
        """What an adapter does, as far as logprobs go; empty for the base model."""
        own = b"" if self.begun("ignores-adapter") else self.adapters.get(adapter, b"")
        return own + (b"other base" if self.begun("other-base") else b"")

    def journal(self, event: str, **facts) -> None:
        path = os.environ.get("TANDEM_FAKE_JOURNAL")
        if path:
            with Path(path).open("a") as file:
                file.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")

    def log_probabilities(self, identity: bytes, before: list[int], temperature: float, top_k: int) -> list[float]:
        """Of every next token, after `before`."""
        if "flat" in self.faults and not top_k:
            return [-math.log(VOCAB)] * VOCAB
        rng = random.Random(hashlib.sha256(identity + repr(before[-3:]).encode()).digest())
        logits = [rng.gauss(0, 2) / temperature for _ in range(VOCAB)]
        if top_k > 0:
            least = sorted(logits)[-top_k]
            logits = [x if x >= least else -math.inf for x in logits]
        total = math.log(sum(math.exp(x) for x in logits))
        return [x - total for x in logits]

    def sample(self, adapter: str, prompt: list[int], ask: Ask, index: int) -> Sampled:
        greedy = ask.temperature == 0
        rng = random.Random(repr((ask.seed, index, prompt, time.monotonic_ns() if ask.seed is None else 0)))
        identity = self.identity(adapter)
        if "stale-cache" in self.faults:
            identity = self.cache.setdefault(tuple(prompt), identity)
        ids, logprobs, finish = [], [], "length"
        for _ in range(min(ask.max_tokens, self.max_context - len(prompt))):
            options = (1.0, 0) if greedy else (ask.temperature, ask.top_k)
            every = self.log_probabilities(identity, prompt + ids, *options)
            weights = [math.exp(x) for x in every]
            token = every.index(max(every)) if greedy else rng.choices(range(VOCAB), weights)[0]
            ids.append(token)
            if "old-logprobs" in self.faults:
                every = self.log_probabilities(identity, prompt + ids[:-1], 1.0, 0)
            logprobs.append(every[token] + (0.1 if "shifts-logprobs" in self.faults else 0.0))
            if token in {*([] if ask.ignore_eos else [EOS]), *ask.stop}:
                finish = "stop"
                break
        self.generation_tokens += len(ids)
        return Sampled(ids, logprobs, finish)

    def score(self, adapter: str, prompt: list[int]) -> list[float | None]:
        """One a token; None for the first."""
        identity = self.identity(adapter)
        known = [self.log_probabilities(identity, prompt[:i], 1.0, 0)[prompt[i]] for i in range(1, len(prompt))]
        return [None, *known]

    async def misbehave(self, request: web.Request) -> str:
        """Everything that can go wrong with a generation; the text of an inner error, if there is to be one."""
        self.journal("asked")
        if "dies" in self.faults:
            os._exit(13)
        if "freezes" in self.faults:
            time.sleep(3600)  # noqa: ASYNC251 (the fault is that nothing else runs)
        if "hangs" in self.faults:
            await asyncio.Event().wait()
        if "holds" in self.faults:
            await exists(self.faults["holds"])
        if "drops-connection" in self.faults:
            assert request.transport
            request.transport.abort()
            del self.faults["drops-connection"]
        return "an inner fault" if "answers-500" in self.faults else ""

    async def load(self, name: str, path: Path) -> None:
        """Load an adapter. Raises Unloadable, or misbehaves."""
        self.journal("load", name=name, path=str(path), files=sorted(p.name for p in path.glob("*")))
        if "load-hangs" in self.faults:
            await asyncio.Event().wait()
        if "load-holds" in self.faults:
            await exists(self.faults["load-holds"])
        if "load-dies" in self.faults:
            os._exit(14)
        if "load-500" in self.faults or "load-400" in self.faults:
            raise Unloadable(500 if "load-500" in self.faults else 400, "this adapter is not to my taste")
        if name in self.adapters:
            raise Unloadable(400, f"The lora adapter '{name}' has already been loaded: it is already loaded")
        if not path.is_dir():
            raise Unloadable(404, f"Loading lora {name} failed: No adapter found for <path>")
        if len(self.adapters) >= self.max_loaded:
            raise Unloadable(500, "too many adapters: the real one would begin to read them again and again")
        if json.loads((path / "adapter_config.json").read_text())["r"] > self.max_rank:
            raise Unloadable(500, "LoRA rank is greater than max_lora_rank")
        if "unlisted" not in self.faults:
            self.adapters[name] = digest(path / "adapter_model.safetensors", self.faults.get("drops-module", ""))


def digest(path: Path, dropped: str) -> bytes:
    """Of an adapter's weights; dropped: a module that is left out."""
    data = path.read_bytes()
    if not dropped:
        return hashlib.sha256(data).digest()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    kept = [entry["data_offsets"] for name, entry in header.items() if "data_offsets" in entry and dropped not in name]
    return hashlib.sha256(b"".join(data[start + first : start + end] for first, end in kept)).digest()


def family(name: str, kind: str, labels: str, value: float) -> str:
    """One figure as the engines print it for Prometheus."""
    return f"# HELP {name} What it counts.\n# TYPE {name} {kind}\n{name}{{{labels}}} {float(value)}\n"


async def exists(path: str) -> None:
    while not Path(path).exists():  # noqa: ASYNC110 (another process makes the file)
        await asyncio.sleep(POLL_S)


def meet(fake: Fake, nodes: int, rank: int, address: str) -> None:
    """Nodes of one engine find each other, and end when one of them does. Only the first one returns."""
    host, _, port = address.rpartition(":")
    if rank == 0:
        with socket.create_server((host, int(port))) as listening:
            others = [listening.accept()[0] for _ in range(nodes - 1)]
        for other in others:
            threading.Thread(target=lambda other=other: os._exit(15 + len(other.recv(1))), daemon=True).start()
        fake.journal("met")
        return
    while True:
        try:
            first = socket.create_connection((host, int(port)))
            break
        except OSError:
            time.sleep(POLL_S)
    fake.journal("joined", rank=rank)
    first.recv(1)
    sys.exit("RuntimeError: the first node has left")


def run(fake: Fake, routes: dict[tuple[str, str], Callable], *, middlewares=(), nodes: tuple = (), **where) -> None:
    """Serve until told to end; misbehaves at the start if it is to. where: what aiohttp is to listen on.

    nodes: how many, the rank of this one, and the address at which they meet.
    """
    fake.journal("start", argv=sys.argv[1:], environment=dict(os.environ))
    if "dies-at-start" in fake.faults:
        sys.exit("Traceback (most recent call last):\nValueError: the fake engine does not like this model")
    if "port-clash" in fake.faults:
        sys.exit("OSError: [Errno 98] Address already in use")
    if "has-child" in fake.faults:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        fake.journal("child", child=child.pid)
    handle_signals = "ignores-sigterm" not in fake.faults
    if not handle_signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "never-listens" in fake.faults:
        time.sleep(3600)
    if "slow-start" in fake.faults:
        time.sleep(float(fake.faults["slow-start"]))
    while "starts-when" in fake.faults and not Path(fake.faults["starts-when"]).exists():
        time.sleep(POLL_S)
    if nodes and nodes[0] > 1:
        meet(fake, *nodes)
    app = web.Application(client_max_size=64 << 20, middlewares=middlewares)
    app["fake"] = fake
    for (method, route), handler in routes.items():
        if fake.faults.get("no-route") != route:
            app.router.add_route(method, route, handler)
    web.run_app(app, handle_signals=handle_signals, access_log=None, print=None, shutdown_timeout=0.5, **where)
