"""The doctor's checks of the machine: driver, libraries, compiler, memory, disk."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from environments.errors import SetupError
from environments.findings import Finding
from environments.lockfile import Section
from environments.preflight import Gpu, bytes_needed, check_driver, check_platform, cuda_major

_SHARED_MEMORY = 1 << 30
_TIMEOUT_S = 30.0


def check(sections: list[Section], gpus: list[Gpu] | SetupError | None, python: Path, venvs: Path) -> list[Finding]:
    """Check the machine for the sections that it is to run.

    `gpus` is the driver's list or its failure, or None: it was not asked. `python` is the interpreter that the
    environments are built with.
    """
    headers = python.resolve().parents[1] / "include" / f"python{sections[0].python}"
    found = [_platform(sections), *_driver(sections, gpus)]
    if isinstance(gpus, list):
        found += [_gpu_memory(gpu) for gpu in gpus]
    cuda = any(section.accelerator == "cuda" for section in sections)
    found += [*python_path(os.environ), numa(), *compiler(headers, cuda=cuda)]
    return [*found, shared_memory(Path("/dev/shm")), _disk(sections, venvs)]  # noqa: S108


def _platform(sections: list[Section]) -> Finding:
    for section in sections:
        try:
            check_platform(section)
        except SetupError as error:
            return refused("platform", error)
    return Finding("platform", "ok", f"{os.uname().sysname} {os.uname().machine}, {os.confstr('CS_GNU_LIBC_VERSION')}")


def refused(name: str, error: SetupError) -> Finding:
    """The finding for something that set-up refuses as well."""
    return Finding(name, "failure", f"{error.what}: {error.why}", error.remedy)


def _driver(sections: list[Section], gpus: list[Gpu] | SetupError | None) -> Iterator[Finding]:
    if gpus is None:
        yield Finding("driver", "ok", "not asked: the CPU is to be used")
    elif isinstance(gpus, SetupError):
        yield refused("driver", gpus)
    elif not gpus:
        yield Finding("driver", "ok", "no NVIDIA GPU: small models run on the CPU")
    else:
        built_for = {major for major in map(cuda_major, sections) if major}
        try:
            for section in sections:
                check_driver(section, gpus[0].driver)
        except SetupError as error:
            yield refused("driver", error)
        else:
            cuda = " and ".join(str(major) for major in sorted(built_for)) or "none"
            yield Finding("driver", "ok", f"NVIDIA {gpus[0].driver}; the environments are built for CUDA {cuda}")


def _gpu_memory(gpu: Gpu) -> Finding:
    name = f"gpu {gpu.index}"
    detail = f"{gpu.name}: {gpu.memory_used:.0f} of {gpu.memory_total:.0f} MiB in use"
    if gpu.memory_used <= 0.1 * gpu.memory_total:
        return Finding(name, "ok", detail)
    holders = _holders(gpu.index)
    held = f" by {', '.join(holders)}" if holders else " by processes that the driver does not show here"
    return Finding(name, "warning", detail + held, "end what holds the memory, or choose other GPUs with --server-gpus")


def _holders(index: str) -> list[str]:
    command = ["nvidia-smi", "-i", index, "--query-compute-apps=pid,process_name,used_memory"]
    try:
        answer = subprocess.run(
            [*command, "--format=csv,noheader"], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ["process " + " ".join(line.split(", ")) for line in answer.stdout.splitlines() if line[:1].isdigit()]


def python_path(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Set-up and the doctor go without it; a run does not, for a reward may be found through it."""
    if value := variables.get("PYTHONPATH"):
        why = f"{value} goes before the packages of both halves in a run"
        yield Finding("PYTHONPATH", "warning", why, "unset PYTHONPATH, unless a reward's module, and no more, is there")


def numa() -> Finding:
    """Both engines' compiled kernels are linked against libnuma."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        why = "libnuma.so.1 is missing, and the engines' kernels are linked against it"
        return Finding("libnuma", "failure", why, "install libnuma1 (Debian, Ubuntu) or numactl-libs (RHEL)")
    return Finding("libnuma", "ok", "libnuma.so.1 loads")


def compiler(headers: Path, *, cuda: bool) -> Iterator[Finding]:
    """Triton and torch.compile build small modules when they run; on a GPU nothing works without that."""
    bad = "failure" if cuda else "warning"
    remedy = "install gcc, g++ and the headers of Python (Debian, Ubuntu: build-essential python3-dev)"
    program = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if program:
        yield Finding("compiler", "ok", program)
    else:
        yield Finding("compiler", bad, "no C compiler, which Triton needs at run time", remedy)
    header = headers / "Python.h"
    if header.exists():
        yield Finding("python headers", "ok", str(header))
    else:
        yield Finding("python headers", bad, f"{header} is missing, which Triton needs at run time", remedy)


def shared_memory(place: Path) -> Finding:
    """NCCL, data loaders and the adapter spool use it; containers often start with 64 MB."""
    if not place.is_dir():
        return Finding("shared memory", "warning", f"{place} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(place).free
    detail = f"{free / 1e9:.1f} GB free in {place}"
    if free < _SHARED_MEMORY:
        return Finding("shared memory", "warning", detail, "start the container with --shm-size=8g or --ipc=host")
    return Finding("shared memory", "ok", detail)


def _disk(sections: list[Section], venvs: Path) -> Finding:
    place = next(path for path in (venvs, *venvs.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    needed = sum(bytes_needed(section) for section in sections if not (venvs / section.environment).exists())
    detail = f"{free / 1e9:.0f} GB free at {place}"
    if free < needed:
        remedy = "free some space, or choose another disk with TANDEM_VENVS and UV_CACHE_DIR"
        return Finding("disk", "failure", f"{detail}, {needed / 1e9:.0f} GB needed", remedy)
    if free < 5e9:
        return Finding("disk", "warning", f"{detail}: checkpoints may not fit", "free some space")
    return Finding("disk", "ok", detail)
