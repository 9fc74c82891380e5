"""What an engine child inherits from this process, and what it must not."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""PYTHONDONTWRITEBYTECODE would have the engine compile thousands of modules at every start: a minute, each time."""

_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "ACCELERATE_")
"""A distributed launcher's names for the trainer's ranks; the engine would take itself for one of them."""

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def cleaned(environment: Mapping[str, str], device: str) -> dict[str, str]:
    """The variables for an engine child, which runs in this process's environment. device: cpu or cuda."""
    dropped = {*_PYTHON, *_LAUNCHER}
    if device == "cpu":
        dropped.add("OMP_NUM_THREADS")  # The engine binds its own threads; a number for the trainer is wrong for it.
    kept = {
        name: value
        for name, value in environment.items()
        if name not in dropped and not name.startswith(_LAUNCHER_PREFIXES)
    }
    for name in _ALLOCATORS:
        if name in kept:
            kept[name] = _without_expandable_segments(kept[name])
            if not kept[name]:
                del kept[name]
    kept["PATH"] = _with_own_programs(kept.get("PATH", os.defpath))
    return kept


def _with_own_programs(path: str) -> str:
    """Kernels are compiled with `ninja`, which is looked up there: the environment's own, before the system's."""
    # Not resolved: the interpreter is a link out of the environment.
    own = str(Path(sys.executable).parent)
    return os.pathsep.join([own, *(part for part in path.split(os.pathsep) if part != own)])


def _without_expandable_segments(setting: str) -> str:
    """Segments that grow cannot be given back: with them sleep frees nothing."""
    return ",".join(part for part in setting.split(",") if not part.strip().startswith("expandable_segments"))
