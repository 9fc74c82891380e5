"""The command line of tandem-train. Standard library only: scripts/train.py shows it before anything is installed."""

from __future__ import annotations

import argparse
import json
import re
import sys
import typing
from pathlib import Path

if typing.TYPE_CHECKING:
    from collections.abc import Sequence

BACKENDS = ("vllm", "sglang")
PLACEMENTS = ("auto", "split", "shared", "time-share", "cpu")
ACCELERATORS = ("auto", "cuda", "cpu")
COMMANDS = {
    "report": "one HTML page of one or more runs",
    "evaluate": "answer a run's held-out examples, with its adapter or without",
    "export": "a run's adapter, or the whole model with it, for others to use",
    "config": "show, check or compare configurations",
}
"""Subcommands, which have command lines of their own: trainer_env/commands."""

LATEST = "latest"
"""What `--resume` without a name asks for: the newest run in output_dir."""

_DESCRIPTION = """\
Fine-tune a language model with GRPO and LoRA. The server half samples completions with vLLM or SGLang, the trainer
half turns them into a better adapter with Unsloth and TRL, and each lives in an environment of its own.

Without arguments it trains the demo: a 135M model learns to add two numbers, on a machine without a GPU, an account
or a model hub, in a few minutes.
"""

_EPILOG = """\
examples:
  train.py                                             the demo, on whatever this machine has
  train.py --backend sglang --run adding               the same job, sampled by SGLang, in runs/adding
  train.py --config configs/qwen-gsm8k.toml --check    check a config and print the plan; start nothing
  train.py --set grpo.learning_rate=1e-4 --steps 50    try another value without editing the file
  train.py --set model.name=Qwen/Qwen2.5-0.5B          any Hugging Face model
  train.py --resume adding                             go on from the last checkpoint of runs/adding
  train.py report adding other                         one page of two runs, side by side

other commands (train.py COMMAND --help):
{commands}

A run leaves everything in runs/NAME: config.toml (as resolved), metrics.jsonl, samples.jsonl, reward.png, the logs
of both halves, checkpoints/, and adapter/ in PEFT's format. configs/demo.toml explains what
most runs set, `train.py config show KEY` any setting.
"""


def parse(argv: Sequence[str] | None = None, prog: str = "tandem-train") -> argparse.Namespace:
    """The parsed command line (default: this process's). Prints and exits on --help, --version and on bad usage.

    prog: what the reader typed to get here. Afterwards `config` is the file to load, which for --resume is the run's
    own, and `resume` is the run's name, or None for a new run.
    """
    parser = _parser(prog)
    arguments = parser.parse_args(argv)
    if arguments.resume is None:
        arguments.config = arguments.config or demo()
        return arguments
    if arguments.config or arguments.run:
        parser.error("--resume goes on with the run's own name and config: leave out --config and --run")
    output_dir = Path(dict(item.split("=", 1) for item in arguments.set).get("output_dir", "runs").strip("\"'"))
    arguments.resume = arguments.resume if arguments.resume != LATEST else _latest(output_dir)
    if arguments.resume is None:
        parser.error(f"--resume: {output_dir} holds no run")
    arguments.config = output_dir / arguments.resume / "config.toml"
    if not arguments.config.is_file():
        runs = ", ".join(sorted(path.parent.name for path in output_dir.glob("*/config.toml"))) or "none"
        parser.error(f"--resume: there is no run {arguments.resume!r} in {output_dir}; there are: {runs}")
    return arguments


def to_overrides(arguments: argparse.Namespace) -> list[str]:
    """The arguments that stand for settings, as `key=value` for config.load. A flag wins over --set of the same key."""
    flags = {
        "server.backend": arguments.backend,
        "grpo.max_steps": arguments.steps,
        "run": arguments.run,
        "placement.mode": arguments.placement,
        "placement.server_gpus": arguments.server_gpus,
        "placement.trainer_gpus": arguments.trainer_gpus,
        "placement.accelerator": arguments.accelerator,
    }
    # JSON's strings, numbers and lists of strings are TOML as well; quoting keeps a run called 1e5 a name.
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    return [*arguments.set, *given]


def version() -> str:
    """Tandem's version: of the installed package, else of this checkout."""
    from importlib import metadata

    try:
        return metadata.version("tandem-trainer")
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        found = re.search(r'^version = "(.+)"', project.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else "unknown"


def demo() -> Path:
    """The default job: of the working directory, else of the checkout that this file is part of."""
    here = Path("configs/demo.toml")
    return here if here.is_file() else Path(__file__).resolve().parents[3] / here


def _latest(output_dir: Path) -> str | None:
    """The run that was started last."""
    configs = sorted(output_dir.glob("*/config.toml"), key=lambda path: path.stat().st_mtime)
    return configs[-1].parent.name if configs else None


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"tandem {version()}\n")
        parser.exit()


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_DESCRIPTION,
        epilog=_EPILOG.format(commands="\n".join(f"  {name:<9} {what}" for name, what in COMMANDS.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the job").add_argument
    add(
        "--config",
        type=Path,
        metavar="FILE",
        help="the TOML file that describes the run (default: configs/demo.toml)",
    )
    add("--backend", choices=BACKENDS, help="the engine that samples; nothing else in the config changes")
    add("--steps", type=_positive, metavar="N", help="optimizer steps to take: grpo.max_steps")
    add(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="change one setting by its dotted key, in TOML's syntax; may be given several times",
    )
    add = parser.add_argument_group("the run").add_argument
    add("--run", type=_run_name, metavar="NAME", help="folder of the run under output_dir (default: config and time)")
    add(
        "--resume",
        nargs="?",
        const=LATEST,
        type=_run_name,
        metavar="RUN",
        help="go on from a run's last checkpoint, with its own config; without a name, the newest run",
    )
    add("--check", action="store_true", help="check the config, print the plan, start nothing")
    add = parser.add_argument_group("the machine").add_argument
    add(
        "--placement",
        choices=PLACEMENTS,
        help="split: each half has its own GPUs; shared: one GPU, both at once; time-share: one GPU, in turns; "
        "cpu: no GPU; auto: what the machine has (default)",
    )
    add("--server-gpus", type=_devices, metavar="IDS", help="GPUs that sample: 0,1 or GPU-… or MIG-… (default: first)")
    add("--trainer-gpus", type=_devices, metavar="IDS", help="GPUs that train (default: all others)")
    add("--accelerator", choices=ACCELERATORS, help="which environments to use: auto asks nvidia-smi (default)")
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="print the version and exit",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _setting(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE such as grpo.learning_rate=1e-4, got {text!r}")
    return text


def _run_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(f"expected letters, digits, '.', '_' or '-' only, got {text!r}")
    return text


def _devices(text: str) -> list[str]:
    ids = [part.strip() for part in text.split(",")]
    if not all(ids):
        raise argparse.ArgumentTypeError(f"expected device ids joined by commas, got {text!r}")
    return ids
