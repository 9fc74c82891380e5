"""The server that a run's last trainer has left: who it is, and whether the run can go on with it."""

import fcntl
from pathlib import Path
from typing import Any

import msgspec

from bridge.endpoint import write_private
from trainer_env.devices import Devices

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
    free_bytes: dict[str, int] = {}
    """Of its GPUs, before it started."""

    def write(self, run_dir: Path) -> None:
        """Keep it in the run's folder (0600: an engine's variables may hold secrets)."""
        write_private(run_dir / RECORD, msgspec.json.encode(self))


def read(run_dir: Path) -> Started | None:
    """What the last trainer of this folder wrote down; None when there is nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=Started)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def as_it_was_planned(devices: Devices, run_dir: Path) -> Devices:
    """The devices with what the server that this run has left holds of them counted as free, if it still lives.

    Whoever goes on with it plans as it was planned for.
    """
    left = read(run_dir) if held(run_dir) else None
    if left is None:
        return devices
    gpus = (msgspec.structs.replace(d, free_bytes=left.free_bytes.get(d.id, d.free_bytes)) for d in devices.gpus)
    return msgspec.structs.replace(devices, gpus=tuple(gpus))


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
