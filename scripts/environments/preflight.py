"""What must hold of the machine before anything is installed; each refusal is one line with its remedy."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from environments.errors import SetupError
from environments.lockfile import Lock, Section

# The oldest driver branch for each CUDA major version, by NVIDIA's compatibility table.
OLDEST_DRIVER = {12: 525, 13: 580}
# Unpacked size by download size, measured over the three environments.
_UNPACKED = {"cuda": 2.5, "cpu": 3.6, "any": 3.6}
_PYTHON_TIMEOUT_S = 20.0
_NVIDIA_SMI_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Gpu:
    """One visible NVIDIA GPU; memory in MiB."""

    index: str
    name: str
    driver: str
    memory_total: float
    memory_used: float


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where there is no nvidia-smi.

    Raises:
        SetupError: nvidia-smi is there and fails, so the driver is broken.
    """
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    fields = "index,name,driver_version,memory.total,memory.used"
    try:
        answer = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise _broken_driver(f"nvidia-smi gave no answer in {_NVIDIA_SMI_TIMEOUT_S:.0f} s") from None
    said = (answer.stdout + answer.stderr).strip()
    if "No devices were found" in said:
        return []
    if answer.returncode:
        raise _broken_driver(said.splitlines()[0] if said else f"nvidia-smi ended with {answer.returncode}")
    rows = [[word.strip() for word in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [Gpu(row[0], row[1], row[2], _number(row[3]), _number(row[4])) for row in rows]


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9.]+", text) else 0.0  # "[N/A]" on some devices


def _broken_driver(why: str) -> SetupError:
    return SetupError(
        "the NVIDIA driver does not answer",
        why=why,
        remedy="load or reinstall the driver (a reboot mends a version mismatch), or pass --accelerator cpu",
    )


def choose_accelerator(requested: str | None) -> str:
    """`cuda` where a GPU is visible, else `cpu`; what was asked for wins."""
    return requested or ("cuda" if gpus() else "cpu")


def cuda_major(section: Section) -> int | None:
    """The CUDA major version that a section's torch was built for; None for a CPU section."""
    version = section.pins.get("nvidia-cuda-runtime")
    return int(version.split(".")[0]) if version else None


def check_driver(section: Section, driver: str) -> None:
    """Refuse a driver that is too old for the CUDA build.

    Raises:
        SetupError: with the version that is needed.
    """
    major = cuda_major(section)
    needed = OLDEST_DRIVER.get(major or 0)
    if needed and _numbers(driver) < (needed,):
        raise SetupError(
            f"the NVIDIA driver {driver} is too old",
            why=f"{section.environment} is built for CUDA {major}, which needs driver {needed} or newer",
            remedy=f"install driver {needed} or newer, or pass --accelerator cpu",
        )


def check_platform(section: Section, *, system: str | None = None, libc: tuple[str, str] | None = None) -> None:
    """Refuse a platform that the locked wheels do not run on.

    Raises:
        SetupError: not Linux on x86-64, not glibc, or a glibc that is too old.
    """
    found = system or f"{platform.system()} {platform.machine()}"
    if found != "Linux x86_64":
        raise SetupError(
            f"{found} is not supported",
            why="the engines publish wheels for Linux on x86-64",
            remedy="use a Linux x86-64 machine, container or WSL 2",
        )
    name, version = libc or platform.libc_ver()
    needed = section.platform.rsplit("manylinux_", 1)[-1].replace("_", ".")
    if name != "glibc" or _numbers(version) < _numbers(needed):
        raise SetupError(
            f"the C library {name or 'of this machine'} {version} is too old or not glibc",
            why=f"the wheels of {section.environment} need glibc {needed} or newer",
            remedy="use Debian 12, Ubuntu 22.04, RHEL 9 or newer, or a container of one of these",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def bytes_needed(section: Section) -> int:
    """Disk space that an environment takes once unpacked."""
    return int(section.download_bytes * _UNPACKED[section.accelerator])


def check_disk(sections: Iterable[Section], venvs: Path, variables: Mapping[str, str] = os.environ) -> None:
    """Refuse when the disks of the environments and of uv's cache are too small.

    uv unpacks into its cache and links from there, so on one file system the space is needed once.

    Raises:
        SetupError: with the space that is needed and the space that is free.
    """
    needed = sum(map(bytes_needed, sections))
    cache = Path(variables.get("UV_CACHE_DIR") or Path(variables.get("XDG_CACHE_HOME") or "~/.cache", "uv"))
    for place in (venvs, *_expanded(cache)):
        existing = next(path for path in (place, *place.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < needed:
            raise SetupError(
                f"the disk of {place} is too small",
                why=f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free",
                remedy="free some space, or choose another disk with TANDEM_VENVS and UV_CACHE_DIR",
            )


def _expanded(path: Path) -> list[Path]:
    """A path under a user's home; none for a user without one, as in a container that runs as any uid."""
    try:
        return [path.expanduser()]
    except RuntimeError:
        return []


def find_python(lock: Lock, environment: str, accelerator: str, requested: Path | None = None) -> tuple[Path, str]:
    """A Python interpreter that an environment is locked for, and its version such as `3.11`.

    The one that `TANDEM_PYTHON` names is preferred, then the one that runs this script, then the newest on the machine.

    Raises:
        SetupError: the environment is not in the lock, or no fitting interpreter is found.
    """
    wanted = lock.pythons(environment, accelerator)
    if not wanted:
        raise SetupError(
            f"{environment} is not locked for {accelerator}",
            why="envs.lock has no such section",
            remedy="run scripts/lock_envs.py write",
        )
    for candidate in [requested] if requested else _candidates(wanted):
        version = _version(candidate)
        if version in wanted:
            return candidate, version
    raise SetupError(
        f"no Python {' or '.join(wanted)}" + (f" at {requested}" if requested else ""),
        why=f"{environment} is locked for it and this machine's Python is {platform.python_version()}",
        remedy=f"install python{wanted[-1]} (or name one with TANDEM_PYTHON=PATH)",
    )


def _candidates(versions: list[str]) -> Iterator[Path]:
    if named := os.environ.get("TANDEM_PYTHON"):
        yield Path(shutil.which(named) or named)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    yield Path(sys.base_prefix) / "bin" / f"python{running}"
    for version in reversed(versions):
        found = shutil.which(f"python{version}")
        if found:
            yield Path(found)
        for pyenv in _expanded(Path("~/.pyenv/versions")):
            yield from sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)


def _version(python: Path) -> str | None:
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python == Path(sys.base_prefix) / "bin" / f"python{running}" and python.exists():
        return running
    try:
        answer = subprocess.run(
            [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
            timeout=_PYTHON_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
