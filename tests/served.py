"""Real tandem-server processes for tests: started, talked to through the real bridge client, verified gone."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import lora_files
from bridge import protocol as p
from bridge.client import BridgeClient
from bridge.endpoint import read_connection
from bridge.guard import descendants, processes

ROOT = Path(__file__).parent.parent
VENVS = Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")
FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
PROGRAM = [sys.executable, "-m", "server_env.cli"]
POLL_S = 0.02
LEASE_S = 120.0
"""Far more than a test's own process may stand still: only where a test is about its end should a lease run out."""
BACKEND = "vllm"
"""Of servers whose test does not say; a fixture may change it."""


def program_after(code: str) -> list[str]:
    """tandem-server as a program that first runs some Python: what a test changes about it."""
    return [sys.executable, "-c", f"import sys\n{code}\nfrom server_env.cli import main\nsys.exit(main())"]


PATIENT = program_after(
    "from server_env.supervision.engine_process import EngineProcess\nEngineProcess.stop.__defaults__ = (600.0,)"
)
"""A server that gives its engines ten minutes to end by themselves."""


def toml(value) -> str:
    """A value as TOML: what JSON writes is TOML, but for tables."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def write_config(path: Path, data: dict) -> Path:
    """server.toml from nested dicts."""
    tops = [f"{key} = {toml(value)}" for key, value in data.items() if not isinstance(value, dict)]
    sections = [
        "\n".join([f"[{name}]", *(f"{key} = {toml(value)}" for key, value in section.items())])
        for name, section in data.items()
        if isinstance(section, dict)
    ]
    path.write_text("\n".join([*tops, *sections]) + "\n")
    return path


async def until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Wait for something that has no event of its own, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(POLL_S)


class Client(BridgeClient):
    """The real client; answers are untyped, as each test knows what it asked for."""

    async def ask(self, request: p.Request, buffer: bytes | memoryview | None = None) -> Any:
        return await super().ask(request, buffer)


class Served:
    """A running tandem-server."""

    backend = ""

    def __init__(self, run_dir: Path, process: subprocess.Popen) -> None:
        self.run_dir = run_dir
        self.process = process
        self.seen: set[int] = {process.pid}
        self._clients: list[Client] = []

    @property
    def connection_path(self) -> Path:
        return self.run_dir / "connection.json"

    @property
    def connection(self):
        return read_connection(self.connection_path)

    def note_family(self) -> set[int]:
        """Remember everybody who belongs to it now, to see later that they are gone."""
        if self.process.poll() is None:
            self.seen |= set(descendants(self.process.pid))
        return self.seen

    async def ready(self, timeout_s: float = 90.0) -> "Served":
        await until(
            lambda: self.connection_path.exists() or self.process.poll() is not None, "connection.json", timeout_s
        )
        assert self.process.poll() is None, self.log()
        self.note_family()
        return self

    async def client(self, run_id: str = "", **options) -> Client:
        client = await Client.connect(self.connection, run_id=run_id, **options)
        self._clients.append(client)
        return client

    async def exited(self, timeout_s: float = 90.0) -> int:
        await until(lambda: self.process.poll() is not None, "tandem-server to end", timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode

    def log(self) -> str:
        parts = [self.run_dir / "output.log", self.run_dir / "server.log", *sorted(self.run_dir.glob("engine*.log"))]
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in parts if path.exists())

    def journal(self, event: str = "") -> list[dict]:
        """What the fake engine wrote down."""
        path = self.run_dir / "journal.jsonl"
        entries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [entry for entry in entries if not event or entry["event"] == event]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        self.note_family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        await self.exited()
        await self.gone()

    async def gone(self) -> None:
        """Nobody of the family lives, and nothing of it lies in memory."""
        await until(lambda: not self.seen & processes().keys(), f"{self.seen} to be gone")
        killed = self.process.returncode == -signal.SIGKILL
        assert killed or not self.leftovers()

    def leftovers(self) -> list[Path]:
        """Folders in memory that this server, by its log, has made."""
        return [path for path in Path("/dev/shm").glob("tandem-*") if str(path) in self.log()]


@contextlib.asynccontextmanager
async def served(
    tmp_path: Path,
    model: Path,
    *,
    fault: str = "",
    server: dict | None = None,
    program: list[str] | None = None,
    arguments: tuple[str, ...] = (),
    fake: bool = True,
    wait: bool = True,
    environment: dict | None = None,
    engine: dict | None = None,
    **settings,
) -> AsyncIterator[Served]:
    """A tandem-server in front of the fake engine (or, with fake=False, of the one in program's environment).

    server, settings: keys of [server]. engine: of the engine's own table.
    """
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "connection.json").unlink(missing_ok=True)
    section = {
        "backend": BACKEND,
        "model": str(model),
        "context_length": 512,
        "max_lora_rank": 8,
        "lease_s": LEASE_S,
        **(server or {}),
        **settings,
    }
    if fake:
        section = {"engine_command": FAKE, "device": "cpu", **section}
    config = write_config(tmp_path / "server.toml", {"server": section, section["backend"]: engine or {}})
    variables = {
        **os.environ,
        "TANDEM_CACHE": os.environ.get("TANDEM_CACHE", str(tmp_path / "cache")),
        "TANDEM_FAKE_FAULT": fault,
        "TANDEM_FAKE_JOURNAL": str(run_dir / "journal.jsonl"),
        **(environment or {}),
    }
    with (run_dir / "output.log").open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 (it takes no time, and the tests want its handle)
            [*(program or PROGRAM), "--config", str(config), "--run-dir", str(run_dir), *arguments],
            env=variables,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    it = Served(run_dir, process)
    try:
        if wait:
            await it.ready()
        yield it
    finally:
        await it.close()


def generate(
    prompt: list[int], *, n: int = 1, deadline_s: float = 100.0, version: int = -1, min_version: int = 0, **sampling
):
    """A Generate message."""
    return p.Generate(
        prompt=p.pack_ids(prompt),
        n=n,
        version=version,
        min_version=min_version,
        deadline_s=deadline_s,
        sampling=p.Sampling(**{"max_tokens": 4, **sampling}),
    )


async def publish(client: Client, model: Path, version: int, seed: int | None = None, **changes: Any) -> Any:
    """Publish a random adapter of its own for each seed, by default the version. changes: as for `lora_files.make`."""
    adapter = lora_files.make(model, version if seed is None else seed, **changes)
    return await client.ask(adapter.publish(version), adapter.data)


def score(token_ids: list[int], *, version: int = -1, deadline_s: float = 100.0) -> p.Score:
    """A Score message."""
    return p.Score(token_ids=p.pack_ids(token_ids), version=version, deadline_s=deadline_s)


def environment_python(name: str) -> Path:
    """The Python of an environment; skips the test where that is not installed."""
    path = VENVS / name / "bin" / "python"
    if not path.exists():
        pytest.skip(f"{path} is missing: bash scripts/setup_envs.sh --only {name}")
    return path


def tiny_llama(python: Path, folder: Path) -> Path:
    """A random two-layer Llama with its tokenizer. python: one that has torch and transformers."""
    script = ROOT / "tests" / "engines" / "make_tiny_model.py"
    subprocess.run([python, script, folder], check=True, capture_output=True, timeout=600)
    return folder


def tiny_model(folder: Path) -> Path:
    """A model folder as far as the server half and the fake engine look at it: its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "vocab_size": 512,
                "max_position_embeddings": 1024,
            }
        )
    )
    return folder
