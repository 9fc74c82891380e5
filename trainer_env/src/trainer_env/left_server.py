"""The server that a run's last trainer has left: who it is, and whether the run can go on with it."""

import fcntl
from pathlib import Path
from typing import Any

import msgspec

from bridge.endpoint import write_private

RECORD = "server_process.json"


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A tandem-server as its trainer started it. pid and started (see `guard.Process`) name it for good."""

    pid: int
    started: int
    program: str
    """Its file, links followed: another one once the environment was made anew."""
    environment: dict[str, str]
    """What was added to the trainer's own variables: devices, threads."""
    settings: dict[str, Any]
    """See `server_settings.what_matters`."""

    def write(self, run_dir: Path) -> None:
        """Keep it in the run's folder (0600: an engine's variables may hold secrets)."""
        write_private(run_dir / RECORD, msgspec.json.encode(self))


def read(run_dir: Path) -> Started | None:
    """What the last trainer of this folder wrote down; None when there is nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=Started)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def differences(left: Started, wanted: Started) -> list[str]:
    """Why a server that was left will not do: the settings that differ, by their dotted keys. Empty: it will."""
    keys = list(_different("", left.settings, wanted.settings))
    if left.program != wanted.program:
        keys.append("its environment")
    if left.environment != wanted.environment:
        keys.append("its devices or threads")
    return keys


def held(run_dir: Path) -> bool:
    """Whether any tandem-server holds the run directory."""
    try:
        with (run_dir / "server.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _different(path: str, one: Any, other: Any) -> list[str]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [path.removeprefix(".")]
    return [key for name in sorted(one | other) for key in _different(f"{path}.{name}", one.get(name), other.get(name))]
