#!/usr/bin/env python3
"""Train with one command: prepare what is missing, then hand over to tandem-train.

    python3 scripts/train.py                        # the demo: no GPU, no account, no model hub
    python3 scripts/train.py --backend sglang       # the same job, sampled by the other engine
    python3 scripts/train.py --config my.toml --set grpo.learning_rate=1e-4
    python3 scripts/train.py --help

Any Python 3.11 with its standard library will do: the environments that do the work are made by scripts/setup_envs.sh,
and a run that finds them up to date starts at once.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import FrameType, ModuleType

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "scripts" / "setup_envs.sh"


def main() -> NoReturn:
    """Read the command line, prepare, become tandem-train."""
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one can run this line, and should say so)
        sys.exit(f"train.py needs Python 3.11 or newer, and this is {sys.version.split()[0]}: run it with python3.11.")
    arguments = load_arguments()
    if sys.argv[1:2] and sys.argv[1] in arguments.COMMANDS:
        # They train nothing: whatever environment is there will do, and a job elsewhere may be running from it.
        prepare(["trainer"], "any")
        become_tandem_train()
    parsed = arguments.parse(prog="train.py")
    settings = read_settings(parsed.config, arguments.to_overrides(parsed))
    prepare(environments(settings, arguments.BACKENDS), accelerator(settings))
    become_tandem_train()


def become_tandem_train() -> NoReturn:
    """In this process, so that Ctrl-C and SIGTERM reach it directly."""
    program = venvs() / "trainer" / "bin" / "tandem-train"
    os.execv(program, [str(program), *sys.argv[1:]])  # noqa: S606 (no shell on purpose)


def load_arguments() -> ModuleType:
    """trainer_env/arguments.py by its path: the package is not installed yet."""
    path = ROOT / "trainer_env" / "src" / "trainer_env" / "arguments.py"
    spec = importlib.util.spec_from_file_location("tandem_arguments", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_settings(config: Path, overrides: list[str]) -> dict[str, Any]:
    """What of the config says which environments are needed: dotted key -> value. tandem-train checks the rest."""
    import tomllib

    try:
        document = tomllib.loads(config.read_text(encoding="utf-8"))
    except FileNotFoundError:
        sys.exit(f"{config}: there is no such file.")
    except (OSError, ValueError) as error:
        sys.exit(f"{config}: not a TOML file: {error}.")
    settings = {
        f"{section}.{key}": value
        for section, table in document.items()
        if isinstance(table, dict)
        for key, value in table.items()
    }
    for override in overrides:
        key, _, value = override.partition("=")
        settings[key.strip()] = value.strip().strip("\"'")
    return settings


def environments(settings: dict[str, Any], backends: tuple[str, ...]) -> list[str]:
    """The trainer's environment and the one of the engine that samples."""
    backend = settings.get("server.backend", backends[0])
    if backend not in backends:
        sys.exit(f"server.backend: expected one of {', '.join(backends)}, got {backend!r}.")
    return ["trainer", f"server-{backend}"]


def accelerator(settings: dict[str, Any]) -> str:
    """cpu, cuda, or auto: setup_envs.sh looks for a GPU. A run on the CPU needs engines that were built for it."""
    wanted = str(settings.get("placement.accelerator", "auto"))
    on_cpu = settings.get("placement.mode") == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cpu" if wanted == "auto" and on_cpu else wanted


def prepare(names: list[str], kind: str) -> None:
    """Build the environments that are missing or out of date. Ends the process when that fails.

    kind: cpu, cuda, auto, or any: see setup_envs.sh.
    """
    command = ["sh", str(SETUP), "--only", *names, "--venvs", str(venvs())]
    command += [] if kind == "auto" else ["--accelerator", kind]
    code = run(command)
    if code:
        sys.exit(code)


def run(command: list[str]) -> int:
    """Its exit status; 130 when a Ctrl-C or SIGTERM came, which is passed on: it ends what it has started."""
    asked: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        for child in started:
            child.send_signal(number)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    child = subprocess.Popen(command)
    started.append(child)
    for number in asked[:1]:  # It came before there was a child to find.
        child.send_signal(number)
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return 130 if asked else code


def venvs() -> Path:
    """The folder of the environments."""
    return Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")


if __name__ == "__main__":
    main()
