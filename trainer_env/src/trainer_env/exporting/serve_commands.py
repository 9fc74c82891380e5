"""How to serve a folder that was exported: command lines for either engine, as it is installed here."""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank of vLLM takes; any other is rounded up."""
STACKS = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))
"""Projections that SGLang computes as one: an adapter of some of them is not served as it was trained."""
_HERE = ("--host", "127.0.0.1")


class Served(msgspec.Struct, frozen=True):
    """What is to be served. model: a folder or a hub name. adapter: a PEFT folder to serve on top of it, or none.

    name: of the adapter, or of the model without one. dtype: to compute in; empty: the model's own. rank, modules: the
    adapter's.
    """

    model: str
    name: str
    adapter: Path | None = None
    dtype: str = ""
    rank: int = 0
    modules: tuple[str, ...] = ()
    trust_remote_code: bool = False


def serve_commands(served: Served, venvs: Path | None = None) -> dict[str, str]:
    """A command line for each engine that can serve it, by backend. venvs: where environments are (default: Tandem's).

    An engine that is not installed here is called as it would be on the machine of whoever installs it.
    """
    venvs = venvs or Path(os.environ.get("TANDEM_VENVS") or Path(sys.prefix).parent)
    commands = {"vllm": _vllm(served, venvs / "server-vllm")}
    if not half_stacks(served.modules):
        commands["sglang"] = _sglang(served, venvs / "server-sglang")
    return commands


def asked_as(served: Served, backend: str) -> str:
    """The model that clients name in a request. SGLang answers from the base for the name of an adapter alone."""
    return f"{served.model}:{served.name}" if served.adapter and backend == "sglang" else served.name


def half_stacks(modules: Iterable[str]) -> list[str]:
    """The projections that SGLang would need beside an adapter's own."""
    adapted = set(modules)
    return sorted(name for stack in STACKS if stack & adapted for name in stack - adapted)


def _vllm(served: Served, environment: Path) -> str:
    python = environment / "bin" / "python"
    # The `vllm` script asks for a distribution of that name, which CPU builds do not have.
    start = (
        [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model"] if python.exists() else ["vllm", "serve"]
    )
    command = [*start, served.model, *_common(served)]
    if served.adapter:
        rank = next((rank for rank in VLLM_RANKS if served.rank <= rank), served.rank)
        module = f"{served.name}={served.adapter}"
        command += ["--enable-lora", "--lora-modules", module, "--max-lora-rank", str(rank)]
    else:
        command += ["--served-model-name", served.name]
    return shlex.join(command)


def _sglang(served: Served, environment: Path) -> str:
    python = environment / "bin" / "python"
    start = [str(python) if python.exists() else "python", "-m", "sglang.launch_server", "--model-path"]
    command = [*start, served.model, *_common(served)]
    if served.adapter:
        command += ["--enable-lora", "--lora-paths", f"{served.name}={served.adapter}"]
        command += ["--max-lora-rank", str(served.rank), "--lora-target-modules", *served.modules]
    else:
        command += ["--served-model-name", served.name]
    if _accelerator(environment) != "cpu":
        return shlex.join(command)
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    command += ["--disable-overlap-schedule", "--max-total-tokens", "8192"]
    command += ["--lora-backend", "torch_native"] if served.adapter else []
    variables = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": _stand_ins(environment)}
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items() if value), *command])


def _common(served: Served) -> Sequence[str]:
    dtype = ["--dtype", served.dtype] if served.dtype else []
    return [*_HERE, *dtype, *(["--trust-remote-code"] if served.trust_remote_code else [])]


def _accelerator(environment: Path) -> str:
    """What an environment was built for; empty where there is none."""
    try:
        return json.loads((environment / "tandem-environment.json").read_text(encoding="utf-8"))["accelerator"]
    except (OSError, ValueError, KeyError):
        return ""


def _stand_ins(environment: Path) -> str:
    """The folder of what SGLang lacks on a CPU, which the server half brings: installed there, or linked to."""
    for site in environment.glob("lib/python3.*/site-packages"):
        links = site / "server_env.pth"
        places = [site, *(Path(line) for line in links.read_text().splitlines())] if links.is_file() else [site]
        for place in places:
            if (found := place / "server_env" / "engines" / "sglang_cpu").is_dir():
                return str(found)
    return ""
