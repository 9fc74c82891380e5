"""What a run ran in: versions, machine and GPUs, written down when it starts, for whoever reads the run later."""

import os
import platform
from pathlib import Path

import msgspec

from trainer_env.arguments import version
from trainer_env.placement import Placement
from trainer_env.runs.jsonl import write_atomically
from trainer_env.serving.server_process import versions

FILE = "environment.json"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """environment.json. server, trainer: `name version, …` of what each half's environment holds."""

    tandem: str = ""
    server: str = ""
    trainer: str = ""
    python: str = ""
    platform: str = ""
    cores: int | None = None
    """Of the machine, whoever may use them."""
    gpus: tuple[str, ...] = ()
    """Names of the GPUs that the run uses."""


def write_environment(run_dir: Path, placement: Placement, server: str) -> None:
    """Write environment.json. server: what `Serving.versions` says. Raises BridgeError when the disk refuses."""
    gpus = {device.id: device.name for device in (*placement.server, *placement.trainer)}
    record = Environment(
        tandem=version(),
        server=server,
        trainer=versions("unsloth", "trl", "peft", "transformers", "datasets", "torch"),
        python=platform.python_version(),
        platform=platform.platform(),
        cores=os.cpu_count(),
        gpus=tuple(gpus.values()),
    )
    write_atomically(run_dir / FILE, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
