"""Which engine `[server] backend` means: the only place that knows them all."""

import importlib.metadata
from pathlib import Path

from server_env.config import ServerFile
from server_env.engines import options
from server_env.engines.engine import Endpoint, Engine
from server_env.engines.sglang_http import SGLang
from server_env.engines.vllm_http import VLLM

NOWHERE = Endpoint(Path("ENGINE.sock"), Path())
"""Stands for what changes from start to start, where a command line is only looked at."""


def make_engine(file: ServerFile) -> Engine:
    """The configured engine, not started. Raises ConfigError for options that it could not start with."""
    installed = options.installed()
    match file.server.backend:
        case "vllm":
            return VLLM(file.server, file.vllm, device_of(file), installed)
        case "sglang":
            return SGLang(file.server, file.sglang, device_of(file), installed)


def device_of(file: ServerFile) -> str:
    """Cpu or cuda: as configured, else what this environment's torch was built for."""
    if file.server.device != "auto":
        return file.server.device
    try:
        return "cpu" if importlib.metadata.version("torch").endswith("+cpu") else "cuda"
    except importlib.metadata.PackageNotFoundError:
        return "cpu"
