"""The doctor's checks of what an engine compiles its CUDA kernels with when it runs: ninja, and the CUDA toolkit."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from environments.findings import Finding
from environments.install import Plan

_DEFAULT_TOOLKIT = Path("/usr/local/cuda")
_COMPILER, _HEADERS = "nvidia-cuda-nvcc", "nvidia-cuda-runtime"


def check(
    plan: Plan,
    installed: Mapping[str, str],
    variables: Mapping[str, str] = os.environ,
    default_toolkit: Path = _DEFAULT_TOOLKIT,
) -> Iterator[Finding]:
    """Check an engine's CUDA environment, in which `installed` are the versions by package; nothing for the others."""
    if plan.environment.engine and plan.accelerator == "cuda":
        yield _ninja(plan)
        places = list(_places(variables, default_toolkit))
        # SGLang gets the environment's own where no place has a compiler: see server_env/engines/cuda_toolkit.py.
        taken = places if plan.environment.engine != "sglang" or any(map(_compiles, places)) else []
        yield _toolkit(plan, installed, next(iter(taken), None))


def _places(variables: Mapping[str, str], default: Path) -> Iterator[Path]:
    """Where flashinfer, tvm-ffi and torch look for a CUDA toolkit: they take the first, be it there or not."""
    named = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if named:
        yield Path(named)
    nvcc = shutil.which("nvcc", path=variables.get("PATH", os.defpath))
    if nvcc:
        yield Path(nvcc).parents[1]
    if default.exists():
        yield default


def _compiles(toolkit: Path) -> bool:
    return (toolkit / "bin" / "nvcc").exists()


def _ninja(plan: Plan) -> Finding:
    name = f"{plan.environment.name} ninja"
    program = plan.link / "bin" / "ninja"
    if not program.exists():
        why = f"{program} is missing, with which kernels are compiled at the first use"
        return Finding(name, "warning", why, f"run scripts/setup_envs.sh --only {plan.environment.name}")
    return Finding(name, "ok", str(program))


def _toolkit(plan: Plan, installed: Mapping[str, str], found: Path | None) -> Finding:
    name = f"{plan.environment.name} nvcc"
    compiler, headers = (_release(installed.get(package, "")) for package in (_COMPILER, _HEADERS))
    if found and not _compiles(found):
        return Finding(name, "warning", f"{found} has no bin/nvcc", "set CUDA_HOME to a CUDA toolkit, or unset it")
    if found and not found.resolve().is_relative_to(plan.link.resolve()):
        return Finding(name, "ok", f"kernels are compiled with {found}, if any are")
    if not (found or compiler) and plan.environment.engine == "sglang":
        why = f"neither a CUDA toolkit nor {_COMPILER} is there, and SGLang compiles kernels as it starts"
        return Finding(name, "warning", why, "install the CUDA toolkit and set CUDA_HOME to it")
    if not (compiler and headers) or compiler == headers:
        return Finding(name, "ok", f"the environment's own is of CUDA {compiler or 'none'}, its headers {headers}")
    why = (
        f"{_COMPILER} {installed[_COMPILER]} and the headers of {_HEADERS} {installed[_HEADERS]} are of two CUDA "
        f"releases, {compiler} and {headers}, which kernels that are compiled at run time refuse"
    )
    remedy = f"install the CUDA toolkit {headers} and set CUDA_HOME to it, such as /usr/local/cuda-{headers}"
    return Finding(name, "warning", why, remedy)


def _release(version: str) -> str:
    """`13.0` of `13.0.96`; empty where there is no version."""
    return ".".join(version.split(".")[:2])
