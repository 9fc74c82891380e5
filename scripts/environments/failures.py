"""Turn what uv says when an installation fails into cause and remedy."""

import re
from pathlib import Path

from environments.errors import SetupError
from environments.processes import tail

_HASH = re.compile(r"[Hh]ash mismatch for `?([A-Za-z0-9._-]+==[^`\s]+)`?")
_DISK = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_WHEEL = re.compile(r"no wheels with a matching|no usable wheels|is incompatible with the current", re.IGNORECASE)
_NETWORK = re.compile(
    r"error sending request|Failed to fetch|dns error|Could not connect|timed out|Network is unreachable", re.IGNORECASE
)


def explain(environment: str, log: Path) -> SetupError:
    """The error for a failed call of uv whose output is at the end of `log`."""
    text = log.read_text(errors="replace").rsplit("\n$ ", 1)[-1]
    what = f"{environment} cannot be installed"
    mismatch = _HASH.search(text)
    if mismatch:
        return SetupError(
            f"hash mismatch for {mismatch[1]}",
            why=f"{environment}: the file that the index served is not the one in envs.lock",
            remedy="do not trust that file: check the mirror, or restore envs.lock",
            log=log,
        )
    if _DISK.search(text):
        remedy = "free some space, or choose another disk with TANDEM_VENVS and UV_CACHE_DIR"
        return SetupError(what, why="the disk is full", remedy=remedy, log=log)
    if _WHEEL.search(text):
        remedy = "use Linux x86-64 with the Python that envs.lock names"
        return SetupError(what, why=_said(log), remedy=remedy, log=log)
    if _NETWORK.search(text):
        mirrors = "PIP_INDEX_URL, PIP_FIND_LINKS or, for PyTorch's own page, TANDEM_TORCH_LINKS"
        remedy = f"check the network, or name a mirror with {mirrors}, then run this again"
        return SetupError(what, why=f"an index does not answer ({_said(log)})", remedy=remedy, log=log)
    return SetupError(what, why=_said(log), remedy="read the log, then run this again", log=log)


def _said(log: Path) -> str:
    return " ".join(" ".join(tail(log, 4)).split())[:400]
