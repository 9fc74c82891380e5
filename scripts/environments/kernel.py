"""The trainer's environment as a kernel for Jupyter."""

import subprocess
from pathlib import Path

from environments.errors import SetupError

NAME = "tandem"
TITLE = "Tandem"


def register(venvs: Path) -> str:
    """Write the kernel's description into the user's Jupyter folder; its name and where that is. Raises SetupError.

    It names the environment by its link, so it survives the next build. Bytecode is kept: without, a kernel that
    imports the libraries takes three times as long.
    """
    python = venvs / "trainer" / "bin" / "python"
    command = [python, "-m", "ipykernel", "install", "--user", "--name", NAME, "--display-name", TITLE]
    command += ["--env", "PYTHONDONTWRITEBYTECODE", ""]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise SetupError(
            "the kernel could not be registered",
            why=said.strip().splitlines()[-1],
            remedy="JUPYTER_DATA_DIR names another folder for it",
        ) from None
    return done.stdout.strip().removeprefix("Installed kernelspec ") or f"{NAME}"
