"""Packages that a user adds to the trainer's environment: the command that does it, for the remedies of errors."""

import os
import shlex
import shutil
import sys
from pathlib import Path


def install_command(*packages: str) -> str:
    """A command for a shell that installs them, wherever it is typed. packages: as uv takes them, `wandb>=0.20`.

    The environment has no pip. Its uv is the one on PATH, or the one that scripts/setup_envs.sh got for itself.
    """
    folder = environment()
    own = folder.parent / ".uv" / "bin" / "uv"
    named = os.environ.get("TANDEM_UV")
    uv = "uv" if shutil.which("uv") else named or (str(own) if own.exists() else "uv")
    return shlex.join([uv, "pip", "install", "--python", str(folder / "bin" / "python"), *packages])


def remedy(*packages: str) -> str:
    """What to do about packages that are missing here."""
    return (
        f"{install_command(*packages)}; again after scripts/setup_envs.sh has built a new environment, which it does "
        "for another envs.lock or accelerator."
    )


def environment() -> Path:
    """The folder of the environment that this process runs in, by the name that it keeps when it is built anew."""
    prefix = Path(sys.prefix)
    named = prefix.parent / "trainer"
    return named if named.is_dir() and named.resolve() == prefix.resolve() else prefix
