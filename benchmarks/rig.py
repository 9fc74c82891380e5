"""What the benchmarks of both halves share: a server, started as a run starts its own; summaries; the report."""

import argparse
import contextlib
import json
import os
import platform
import resource
import shlex
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import listening
from bridge.endpoint import private_dir
from trainer_env import config, models
from trainer_env.devices import detect
from trainer_env.models.precision import settled
from trainer_env.placement import Placement, plan
from trainer_env.serving import Serving
from trainer_env.serving.lasting_client import LastingClient
from trainer_env.serving.server_process import environment_folder, versions

ROOT = Path(__file__).parents[1]
TINY = "builtin:tiny-random-llama"
DEADLINE_S = 900.0
"""Of one request: a slow answer is a figure, not an error."""


@dataclass(frozen=True)
class Rig:
    """A server that is ready. client: what a run asks through; listening: see direct.connect; model: its folder.

    publish_dtype: of the adapters that a run would send it.
    """

    client: LastingClient
    placement: Placement
    listening: Path
    model: str
    publish_dtype: str

    @property
    def device(self) -> str:
        """The trainer's, as torch calls it."""
        return "cpu" if self.placement.mode == "cpu" else "cuda"

    @property
    def token_ids(self) -> range:
        """Ordinary tokens to make prompts of."""
        return range(100, self.client.welcome.limits.vocab_size or 512)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all of these benchmarks have."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("backend", choices=["vllm", "sglang"])
    which = found.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        default="builtin:smollm2-135m-instruct",
        help="as model.name of a run; random_model.py makes one for speeds (%(default)s)",
    )
    which.add_argument("--tiny", dest="model", action="store_const", const=TINY, help=f"--model {TINY}")
    found.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for tandem-train")
    found.add_argument("--run-dir", type=Path, help="where logs stay (a temporary folder)")
    found.add_argument("--out", type=Path, help="a file for everything as JSON")
    return found


def numbers(text: str) -> list[int]:
    """`1,64,512` as an option's value."""
    return [int(number) for number in text.split(",")]


@contextlib.contextmanager
def rig(options: argparse.Namespace, **settings: Any) -> Iterator[Rig]:
    """Start a server as a run does, on the devices that a run would give it; end it whatever happens.

    settings: of the run, dots written as two underscores; `--set` wins over them.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _allow_many_connections()
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="tandem-bench-", ignore_cleanup_errors=True)
        folder = private_dir(options.run_dir.absolute() if options.run_dir else Path(stack.enter_context(temporary)))
        address = folder / "listening.json"
        model = models.resolve(options.model)
        chosen = {
            "model__name": model,
            "output_dir": str(folder),
            "run": "bench",
            "server__backend": options.backend,
            "server__engine_command": _wrapper(options.backend),
            f"server__engine_env__{listening.VARIABLE}": str(address),
            **settings,
        }
        # A value that JSON writes is one that TOML reads.
        overrides = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in chosen.items()]
        run = config.load(ROOT / "configs" / "demo.toml", [*overrides, *options.set])
        placement = plan(run.placement, detect(), server=run.server)
        run = settled(run, placement)
        private_dir(run.run_dir)
        serving = Serving(run, placement, say)
        stack.callback(serving.close)
        stack.callback(say, "ending the server")
        serving.start(model, anew=True)
        os.environ.update(placement.trainer_environment())  # Read by torch and CUDA as they are imported.
        yield Rig(serving.connect(), placement, address, model, run.publish_dtype)


def say(text: str) -> None:
    """Tell whoever watches what is going on."""
    print(text, file=sys.stderr, flush=True)


def _wrapper(backend: str) -> list[str]:
    python = environment_folder(backend) / "bin" / "python"
    return [str(python), str(Path(listening.__file__).resolve()), backend]


def _allow_many_connections() -> None:
    """A connection a request needs more open files than the usual soft limit of 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Of some milliseconds: the median, the worst, and all."""
    return {
        "median": round(statistics.median(values), 3),
        "worst": round(max(values), 3),
        "all": [round(value, 3) for value in values],
    }


@dataclass
class Report:
    """What is found, as a table for people and as JSON. Written anew at each finding: a benchmark may be cut short."""

    options: argparse.Namespace
    rig: Rig
    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, finding: dict[str, Any]) -> None:
        """Keep one finding."""
        self.found.append(finding)
        if self.options.out:
            written = json.dumps({**self._context(), "found": self.found}, indent=1, default=str)
            self.options.out.write_text(written + "\n")

    def show(self, table: Table) -> None:
        """Print the table under a line that says what was measured on."""
        about = self._context()
        table.caption = (
            f"{about['engine']}, {self.options.model}, {about['placement']} on {', '.join(about['devices'])}"
        )
        Console(width=None if sys.stdout.isatty() else 120).print(table)

    def _context(self) -> dict[str, Any]:
        welcome, placement = self.rig.client.welcome, self.rig.placement
        devices = {device.id: device.name for device in (*placement.server, *placement.trainer)}
        return {
            "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
            "options": vars(self.options),
            "engine": f"{welcome.engine} {welcome.engine_version}",
            "trainer": versions("torch", "peft", "transformers", "unsloth"),
            "python": platform.python_version(),
            "placement": placement.mode,
            "devices": list(devices.values()) or [f"{placement.cores} cores of {_processor()}"],
            "cores": placement.cores,
            "max_lora_rank": welcome.limits.max_lora_rank,
            "adapter_slots": welcome.limits.adapter_slots,
            "publish_dtype": self.rig.publish_dtype,
        }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()
