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

IO_THREAD = {"data": 0b01, "control": 0b10}
"""The zmq thread of each socket: encrypting an adapter takes a second in which its thread does nothing else."""

IPC_BUFFER_BYTES = 4 << 20
"""What the kernel may hold of a Unix socket's messages, as far as the host lets us. By default it is 208 KiB: an
adapter then crosses in so many pieces that waking both sides for each takes longer than copying them."""


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
    """Of the OpenAI API; empty for none."""
    metrics_url: str = ""
    """Of /metrics: `http://host:port`, or `unix:` and a socket's path; empty for none."""
    log_path: str = ""

    def __repr__(self) -> str:
        """Without the secret, which would end in a log."""
        return f"Connection(data={self.data!r}, control={self.control!r}, pid={self.pid})"


def how_to_read(metrics_url: str) -> str:
    """A command that shows what /metrics says."""
    socket_path = metrics_url.removeprefix("unix:")
    if socket_path == metrics_url:
        return f"curl {metrics_url}/metrics"
    return f"curl --unix-socket {socket_path} http://localhost/metrics"


def for_people(http_url: str, metrics_url: str) -> list[str]:
    """A line for each address that people may look at."""
    lines = [f"OpenAI API: {http_url}/v1"] if http_url else []
    return [*lines, f"metrics: {how_to_read(metrics_url)}"] if metrics_url else lines


def private_dir(path: Path) -> Path:
    """Make (or take over) a directory that nobody else may enter. Raises ConfigError when it is not ours alone."""
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir(mode=0o700 if folder == path else 0o755, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made: {error.strerror}.", remedy="Choose another directory.") from None
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{path} belongs to another user, is shared, or is no directory.", remedy="Choose another directory."
        )
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
    """Read a connection file. Raises PeerDied when there is none, ConfigError when others could read or write it."""
    try:
        with path.open("rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        raise PeerDied(
            f"No server has published {path}.",
            why="It has not started, or it has ended and removed the file.",
            log_path=str(path.with_name("server.log")),
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    if status.st_uid != os.getuid():
        raise ConfigError(f"{path} belongs to another user.", remedy="Use the file that your own server wrote.")
    if status.st_mode & 0o077:
        raise ConfigError(
            f"{path} can be read by other users (mode {status.st_mode & 0o777:o}).",
            remedy=f"chmod 600 {path}",
        )
    try:
        return msgspec.json.decode(data, type=Connection)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
    """Raise ConfigError when somebody listens on an ipc address: a second bind would silently steal it.

    A socket file that a killed server left behind is no hindrance, any other file is.
    """
    path = Path(address.removeprefix("ipc://"))
    if not address.startswith("ipc://") or not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} is in the way: it is no socket.", remedy="Use another run name, or move the file.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError:
            pass  # Somebody is there, but too busy, or not ours to reach.
    raise ConfigError(
        f"Another server already listens on {path}.", remedy="Use another run name, or end that server first."
    )
