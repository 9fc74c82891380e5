"""The CUDA compiler that this environment brings, laid out as those who compile kernels look for a toolkit.

tvm-ffi, FlashInfer and SGLang take CUDA_HOME or CUDA_PATH, the nvcc on PATH, or /usr/local/cuda. They call its bin/nvcc
and link with its lib64/libcudart.so; the packages from the index have lib/libcudart.so.13 alone, where nobody looks.
"""

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

SYSTEM = Path("/usr/local/cuda")
FOLDERS = ("bin", "include", "nvvm")
RUNTIME = "libcudart.so"


def variables(
    cache: Path,
    environment: Mapping[str, str] = os.environ,
    system: Path = SYSTEM,
    packages: Path | None = None,
) -> dict[str, str]:
    """CUDA_HOME for an engine that would find no compiler; nothing where there is one, or this environment has none.

    cache: the engine's folder, in which the toolkit is laid out. packages: where this environment's lie.
    """
    if any((place / "bin" / "nvcc").exists() for place in _places(environment, system)):
        return {}
    own = _own(packages or Path(sysconfig.get_path("purelib")))
    return {"CUDA_HOME": str(_laid_out(own, cache / "cuda"))} if own else {}


def _places(environment: Mapping[str, str], system: Path) -> list[Path]:
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    return [*([Path(named)] if named else []), *([Path(nvcc).parents[1]] if nvcc else []), system]


def _own(packages: Path) -> Path | None:
    """The folder of this environment's compiler, of the newest CUDA if there are several; None where there is none."""
    found = sorted((packages / "nvidia").glob("cu[0-9]*/bin/nvcc"))
    return found[-1].parents[1] if found else None


def _laid_out(own: Path, home: Path) -> Path:
    libraries = home / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:
        _link(home / name, own / name)
    for library in sorted((own / "lib").glob(f"{RUNTIME}.*")):
        _link(libraries / RUNTIME, library)
    return home


def _link(link: Path, target: Path) -> None:
    """Anew, for the environment may have been built again elsewhere."""
    link.unlink(missing_ok=True)
    link.symlink_to(target)
