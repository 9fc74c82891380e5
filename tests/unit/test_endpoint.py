"""Directories and files that nobody else can enter, read or half-read; sockets that nobody steals."""

import os
import socket
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from bridge.endpoint import (
    MAX_IPC_PATH,
    Connection,
    ipc_address,
    private_dir,
    read_connection,
    refuse_live_owner,
    write_connection,
    write_private,
)
from bridge.errors import ConfigError, PeerDied

CONNECTION = Connection(
    data="tcp://127.0.0.1:1", control="tcp://127.0.0.1:2", server_uuid="u", pid=7, client_secret="s" * 40
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_umask():
    """The worst umask there is: whatever a file's mode does not forbid is allowed."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_private_directory_is_0700_under_any_umask(tmp_path, open_umask):
    path = private_dir(tmp_path / "run")
    assert mode(path) == 0o700


def test_the_directories_above_it_are_not_writable_by_others(tmp_path, open_umask):
    private_dir(tmp_path / "runs" / "deep" / "run")
    assert mode(tmp_path / "runs") & 0o022 == 0
    assert mode(tmp_path / "runs" / "deep") & 0o022 == 0


def test_a_directory_of_ours_is_taken_over_and_closed(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(0o777)
    assert private_dir(path) == path
    assert mode(path) == 0o700


def test_a_shared_directory_is_never_taken_over(tmp_path):
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(ConfigError, match="shared"):
        private_dir(shared)
    assert mode(shared) == 0o1777


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="another user"):
        private_dir(path)


def test_a_link_to_a_directory_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError):
        private_dir(tmp_path / "run")


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_the_way_is_a_config_error(tmp_path, path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError):
        private_dir(tmp_path / path)


def test_two_can_make_the_same_directory_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        for path in pool.map(lambda _: private_dir(tmp_path / "a" / "b" / "c"), range(32)):
            assert mode(path) == 0o700


def test_a_connection_file_is_0600_under_any_umask(tmp_path, open_umask):
    write_connection(tmp_path / "connection.json", CONNECTION)
    assert mode(tmp_path / "connection.json") == 0o600


def test_a_connection_file_replaces_an_open_one_with_a_closed_one(tmp_path):
    path = tmp_path / "connection.json"
    path.write_text("{}")
    path.chmod(0o666)
    write_connection(path, CONNECTION)
    assert mode(path) == 0o600


def test_a_connection_comes_back_whole(tmp_path):
    write_connection(tmp_path / "connection.json", CONNECTION)
    assert read_connection(tmp_path / "connection.json") == CONNECTION


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "file"
    contents = {bytes([65 + number]) * 200_000 for number in range(20)}
    write_private(path, next(iter(contents)))
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(lambda: [write_private(path, content) for content in contents])
        while not writing.done():
            assert path.read_bytes() in contents


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_private(path, b"old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_private(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_put_there_first_is_not_written_through(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "guessed")
    theirs = tmp_path / "theirs"
    (tmp_path / ".file.guessed").symlink_to(theirs)
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "file", b"secret")
    assert not theirs.exists()


def test_a_missing_connection_file_means_no_server(tmp_path):
    with pytest.raises(PeerDied) as caught:
        read_connection(tmp_path / "connection.json")
    assert caught.value.log_path == str(tmp_path / "server.log")


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o660])
def test_a_connection_file_that_others_can_read_or_write_is_refused(tmp_path, bits):
    path = tmp_path / "connection.json"
    write_connection(path, CONNECTION)
    path.chmod(bits)
    with pytest.raises(ConfigError) as caught:
        read_connection(path)
    assert "chmod 600" in caught.value.remedy


@pytest.mark.skipif(os.getuid() != 0, reason="only root can read another user's 0600 file at all")
def test_a_connection_file_of_another_user_is_refused(tmp_path):
    path = tmp_path / "connection.json"
    write_connection(path, CONNECTION)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="another user"):
        read_connection(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"data": 3}', b"\xff\xfe", b'{"data": "\xff"}'])
def test_a_damaged_connection_file_is_a_config_error(tmp_path, content):
    path = tmp_path / "connection.json"
    write_private(path, content)
    with pytest.raises(ConfigError, match="not a connection file"):
        read_connection(path)


def test_a_directory_in_place_of_the_connection_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_connection(tmp_path)


def test_the_secret_is_not_in_the_repr():
    assert CONNECTION.client_secret not in repr(CONNECTION)
    assert CONNECTION.client_secret not in f"{CONNECTION}"


def of_length(folder: Path, length: int) -> Path:
    """A path below folder with exactly so many bytes."""
    return folder / ("x" * (length - len(os.fsencode(folder)) - 1))


@pytest.fixture
def short_dir():
    """A directory whose path leaves room: pytest's own are long."""
    path = Path(tempfile.mkdtemp(prefix="tandem-", dir="/tmp"))
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_the_longest_path_that_is_allowed_can_be_bound(short_dir):
    address = ipc_address(of_length(short_dir, MAX_IPC_PATH))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)


def test_a_path_one_byte_longer_is_refused_with_a_remedy(short_dir):
    with pytest.raises(ConfigError, match="108 bytes") as caught:
        ipc_address(of_length(short_dir, MAX_IPC_PATH + 1))
    assert "TMPDIR" in caught.value.remedy


def test_the_length_counts_bytes_not_letters(short_dir):
    with pytest.raises(ConfigError):
        ipc_address(short_dir / ("é" * 60))


def test_a_relative_path_becomes_absolute(monkeypatch, short_dir):
    monkeypatch.chdir(short_dir)
    assert ipc_address(Path("data.ipc")) == f"ipc://{short_dir}/data.ipc"


def test_a_live_owner_is_found(short_dir):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{short_dir}/s")
        with pytest.raises(ConfigError, match="already listens"):
            refuse_live_owner(f"ipc://{short_dir}/s")


def test_an_owner_too_busy_to_accept_is_alive(short_dir):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short_dir}/s")
        listener.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        try:
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(f"{short_dir}/s")
            with pytest.raises(ConfigError, match="already listens"):
                refuse_live_owner(f"ipc://{short_dir}/s")
        finally:
            for client in waiting:
                client.close()


def test_a_file_left_by_a_dead_owner_is_no_hindrance(short_dir):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{short_dir}/s")
        listener.listen()
    assert (short_dir / "s").is_socket()
    refuse_live_owner(f"ipc://{short_dir}/s")


def test_a_file_that_is_no_socket_is_not_taken_for_a_stale_one(short_dir):
    (short_dir / "s").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        refuse_live_owner(f"ipc://{short_dir}/s")


@pytest.mark.parametrize("address", ["ipc:///nowhere/at/all", "tcp://127.0.0.1:1"])
def test_nobody_owns_an_address_without_a_file(address):
    refuse_live_owner(address)
