"""An engine without a server in front of it: for what is asked of its routes."""

import contextlib
import os
import uuid
from pathlib import Path

from server_env.config import from_dict
from server_env.engines.backends import make_engine
from server_env.supervision.engine_process import EngineProcess
from server_env.supervision.scratch import Scratch

START_S = 600
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}


def engine_of(backend: str, command: list[str], model: Path):
    section = {
        "backend": backend,
        "device": "cpu",
        "model": str(model),
        "dtype": "float32",
        "context_length": 128,
        "max_lora_rank": 8,
        "engine_command": command,
        "cpu_kv_gib": 1,
    }
    return make_engine(from_dict({"server": section}, "test"))


@contextlib.asynccontextmanager
async def running(engine, tmp: Path):
    scratch = Scratch(uuid.uuid4().hex)
    process = EngineProcess(
        engine,
        device="cpu",
        scratch=scratch.path,
        cache=tmp / "cache",
        log_path=tmp / "engine.log",
        environment=os.environ,
    )
    try:
        facts = await process.start(START_S)
        yield engine, facts
    finally:
        await process.stop()
        scratch.remove()
