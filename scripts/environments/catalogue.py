"""Which environments there are, where their requirements stand, and what goes into each."""

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "envs.lock"
VENVS = Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")

# The oldest glibc that every locked wheel runs on (Debian 12, Ubuntu 22.04, RHEL 9).
PLATFORM = "x86_64-manylinux_2_34"

# What SGLang lacks on a machine without a GPU. The folder goes on its path for CPU runs only.
SGLANG_CPU_PATH = Path("server_env/src/server_env/engines/sglang_cpu")


@dataclass(frozen=True)
class Environment:
    """One installable environment.

    `packages` are our own distributions in it (folders of the repository); `imports` are the modules whose
    import proves the installation; `engine` is the inference engine whose options are listed at set-up, for which
    it is imported as its server imports it.
    """

    name: str
    packages: tuple[str, ...]
    imports: tuple[str, ...]
    engine: str | None = None


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("trainer", ("bridge", "trainer_env"), ("unsloth", "torch", "trl", "peft", "zmq", "msgspec")),
        Environment("server-vllm", ("bridge", "server_env"), ("zmq", "msgspec", "aiohttp"), engine="vllm"),
        Environment("server-sglang", ("bridge", "server_env"), ("zmq", "msgspec", "aiohttp"), engine="sglang"),
        Environment("dev", ("bridge", "server_env", "trainer_env"), ("pytest", "zmq", "msgspec")),
    )
}
DEFAULT = ("trainer", "server-vllm", "server-sglang")

# Not an environment of Tandem's own code: the installer itself, pinned in the lock like everything else.
UV = "uv"


@dataclass(frozen=True)
class Source:
    """The requirements from which one section of the lock is resolved; paths are relative to the root."""

    environment: str
    accelerator: str
    python: str
    requirements: str
    overrides: str | None = None

    @property
    def key(self) -> str:
        """The section's name in the lock, for example `trainer.cpu.py311`."""
        return section_key(self.environment, self.accelerator, self.python)


def section_key(environment: str, accelerator: str, python: str) -> str:
    """Name the section of an environment for an accelerator and a Python version such as `3.11`."""
    return f"{environment}.{accelerator}.py{python.replace('.', '')}"


def _sources() -> tuple[Source, ...]:
    found = [Source(UV, "any", "3.11", "scripts/environments/uv.in")]
    found += [Source("dev", "any", python, "tests/requirements/dev.in") for python in ("3.11", "3.12")]
    stems = {
        "trainer": "trainer_env/requirements/",
        "server-vllm": "server_env/requirements/vllm-",
        "server-sglang": "server_env/requirements/sglang-",
    }
    for name, stem in stems.items():
        for accelerator, python in (("cpu", "3.11"), ("cuda", "3.11"), ("cuda", "3.12")):
            overrides = f"{stem}{accelerator}-overrides.txt"
            exists = (ROOT / overrides).exists()
            found.append(Source(name, accelerator, python, f"{stem}{accelerator}.in", overrides if exists else None))
    return tuple(found)


SOURCES = _sources()
