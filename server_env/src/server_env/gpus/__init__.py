"""Which GPUs each engine of a server gets: the visible ones, dealt out in their order."""

import shutil
import subprocess
from collections.abc import Mapping

from bridge.errors import ConfigError
from server_env.config import ServerConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def shares(server: ServerConfig, device: str, each: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The variables that give every engine its GPUs. each: how many one engine uses; a single one may see them all.

    Raises ConfigError when there are too few.
    """
    count = server.data_parallel
    if count == 1 or device != "cuda":
        return [{} for _ in range(count)]
    if VISIBLE in server.engine_env:
        raise ConfigError(
            f"server.engine_env: {VISIBLE} would be the same for all {count} engines.",
            remedy="Set it for tandem-server instead: each engine gets its part of it.",
        )
    gpus = visible(environment)
    if len(gpus) < count * each:
        raise ConfigError(
            f"server.data_parallel: {count} engines with {each} GPUs each need {count * each}, "
            f"and {len(gpus)} are visible ({', '.join(gpus) or 'none'}).",
            remedy="Lower server.data_parallel or server.tensor_parallel, or make more GPUs visible (--server-gpus).",
        )
    return [{VISIBLE: ",".join(gpus[i * each : (i + 1) * each])} for i in range(count)]


def visible(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that a process with these variables may use, under the names that CUDA_VISIBLE_DEVICES has for them."""
    if VISIBLE not in environment:
        return [str(index) for index in range(_installed())]
    names = [name.strip() for name in environment[VISIBLE].split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]


def _installed() -> int:
    """GPUs of this machine, by its driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
