"""Builds that appear whole or not at all: digests, markers, links that flip, removal of old builds."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARKER = "tandem-environment.json"


def short_digest(*parts: str) -> str:
    """Twelve hexadecimal digits that name a build by everything that went into it."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, after a power cut as well."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def write_marker(build: Path, content: Mapping[str, Any]) -> None:
    """Declare a build complete."""
    write_json(build / MARKER, content)


def read_marker(build: Path) -> dict[str, Any] | None:
    """What a complete build says of itself; None for a build that was never finished."""
    try:
        return json.loads((build / MARKER).read_text())
    except (OSError, ValueError):
        return None


def point(link: Path, build: Path) -> None:
    """Make `link` a relative symbolic link to `build`, in one step."""
    if link.is_symlink() and link.readlink() == Path(build.name):
        return
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(build.name)
    aside.replace(link)


def remove_stale(link: Path, keep: Path) -> None:
    """Remove the builds of `link` that `keep` replaces, except those a live process of this host still runs from.

    It replaces those for its own accelerator, and what is incomplete. A build for the other accelerator stays: another
    host may run from it, and to go back to it is a matter of the link.
    """
    prefix = f"{link.name}-"
    accelerator = _accelerator(keep)
    others = [
        path
        for path in link.parent.iterdir()
        if path != keep
        and path.name.startswith(prefix)
        and _is_digest(path.name[len(prefix) :])
        and (read_marker(path) is None or _accelerator(path) == accelerator)
    ]
    busy = _mapped_files() if others else ""
    for path in others:
        if f"{path.resolve()}/" not in busy:  # maps have real paths
            shutil.rmtree(path, ignore_errors=True)


def _accelerator(build: Path) -> str | None:
    return (read_marker(build) or {}).get("accelerator")


def _is_digest(text: str) -> bool:
    return len(text) == 12 and all(character in "0123456789abcdef" for character in text)


def _mapped_files() -> str:
    """The memory maps of every process that we may look at: they name the libraries it has loaded."""
    maps = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(path.read_text(errors="replace"))
        except OSError:  # it ended, or it is another user's
            continue
    return "".join(maps)


def new_log(venvs: Path, name: str) -> Path:
    """A fresh log file for one build; the previous one is kept beside it with the suffix `.1`."""
    folder = venvs / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}.log"
    if log.exists():
        log.replace(folder / f"{name}.log.1")
    log.write_text(time.strftime("%Y-%m-%d %H:%M:%S %z\n"))
    return log
