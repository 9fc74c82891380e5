"""Where a server can be reached: its private directory, its connection file, its addresses."""

import os
import secrets
import socket
import stat
from pathlib import Path

import msgspec

from bridge.errors import ConfigError, PeerDied

MAX_IPC_PATH = 107
"""Bytes of a Unix socket path on Linux (sockaddr_un holds 108 with the closing zero)."""


class Connection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client needs to reach a server. Holds secrets on tcp: the file is 0600."""

    data: str
    control: str
    server_uuid: str
    pid: int
    server_key: str = ""
    """CURVE public key of the server (z85); empty on ipc."""
    client_public: str = ""
    client_secret: str = ""
    http_url: str = ""
    log_path: str = ""


def private_dir(path: Path) -> Path:
    """Make (or take over) a directory that nobody else may enter. Raises ConfigError when it is not ours."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user, or is no directory.", remedy="Choose another directory.")
    path.chmod(0o700)
    return path


def write_private(path: Path, data: bytes) -> None:
    """Write a 0600 file whole: under another name first, then renamed over path."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_connection(path: Path, connection: Connection) -> None:
    """Publish a connection file (0600, whole or not at all)."""
    write_private(path, msgspec.json.format(msgspec.json.encode(connection)))


def read_connection(path: Path) -> Connection:
    """Read a connection file. Raises PeerDied when there is none, ConfigError when others could read it."""
    try:
        status = path.stat()
        data = path.read_bytes()
    except FileNotFoundError:
        raise PeerDied(
            f"No server has published {path}.",
            why="It has not started, or it has ended and removed the file.",
            log_path=str(path.with_name("server.log")),
        ) from None
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read by other users (mode {status.st_mode & 0o777:o}).",
            remedy=f"chmod 600 {path}",
        )
    try:
        return msgspec.json.decode(data, type=Connection)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a connection file: {error}.") from None


def ipc_address(path: Path) -> str:
    """The zmq address of a socket file. Raises ConfigError when the path is too long for the system."""
    length = len(os.fsencode(path.absolute()))
    if length > MAX_IPC_PATH:
        raise ConfigError(
            f"The socket path {path} has {length} bytes; the system allows {MAX_IPC_PATH}.",
            remedy="Set TMPDIR to a shorter directory.",
        )
    return f"ipc://{path.absolute()}"


def refuse_live_owner(address: str) -> None:
    """Raise ConfigError when somebody listens on an ipc address: a second bind would silently steal it."""
    path = address.removeprefix("ipc://")
    if path == address:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1)
        probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    finally:
        probe.close()
    raise ConfigError(
        f"Another server already listens on {path}.", remedy="Use another run name, or end that server first."
    )
