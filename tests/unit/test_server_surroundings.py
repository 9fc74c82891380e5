"""Leases, caches, scratch folders, environments: the parts of the server half that need no engine."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time

import pytest

from bridge.digest import digest
from bridge.endpoint import private_dir
from bridge.errors import ConfigError, Refused
from server_env.adapters.spool import Spool
from server_env.config import ServerFile, from_dict, load, loopback
from server_env.lease import LeaseBook
from server_env.ownership import own
from server_env.supervision import scratch
from server_env.supervision.cache import EngineCache
from server_env.supervision.environment import cleaned
from server_env.supervision.scratch import Scratch, sweep


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book(clock):
    return LeaseBook(15.0, clock=clock)


HERE = f"{os.uname().nodename}:{os.getpid()}"


def test_a_lease_lives_as_long_as_its_heartbeat(book, clock):
    assert not book.alive
    book.attach("run", "h:1")
    for _ in range(5):
        clock.now += 14
        assert book.alive
        book.beat(1)
    clock.now += 15
    assert not book.alive


def test_processes_of_one_run_share_its_epoch(book):
    assert book.attach("run", HERE)
    assert not book.attach("run", HERE)
    assert book.epoch == 1


def test_another_run_waits_for_the_end_of_the_lease(book, clock):
    book.attach("one", "elsewhere:1")
    clock.now += 14
    with pytest.raises(Refused, match="Run 'one'"):
        book.attach("two", "elsewhere:2")
    clock.now += 2
    assert book.attach("two", "elsewhere:2")
    assert book.epoch == 2


def test_a_run_that_was_killed_on_this_host_is_taken_over_at_once(book):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    book.attach("run", f"{os.uname().nodename}:{child.pid}")
    assert book.attach("run", HERE)
    assert book.epoch == 2


def test_a_trainer_that_nobody_has_collected_is_dead_all_the_same(book):
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    book.attach("run", f"{os.uname().nodename}:{child.pid}")
    assert book.attach("run", HERE, alone=True)
    child.wait()


def test_who_wants_it_alone_does_not_share_it_with_a_trainer_that_lives(book, clock):
    book.attach("run", "elsewhere:1", alone=True)
    with pytest.raises(Refused, match="holds this server"):
        book.attach("run", "elsewhere:2", alone=True)
    clock.now += 16
    assert book.attach("run", "elsewhere:2", alone=True)
    assert book.epoch == 2


def test_a_trainer_that_goes_leaves_the_server_to_the_next_at_once_and_its_heartbeats_are_late(book, clock):
    book.attach("run", HERE, alone=True)
    book.end()
    assert not book.alive
    assert book.silent_s == pytest.approx(book.lease_s)  # What is kept is kept from now on.
    with pytest.raises(Refused):
        book.beat(1)
    assert book.attach("run", HERE, alone=True)
    book.beat(book.epoch)


def test_a_silent_trainer_that_comes_back_before_anybody_else_goes_on(book, clock):
    book.attach("run", "elsewhere:1")
    clock.now += 60
    book.beat(1)
    assert book.alive


def test_what_is_of_an_older_epoch_is_refused(book, clock):
    book.attach("run", "elsewhere:1")
    clock.now += 60
    book.attach("run", "elsewhere:2")
    for refuse in (book.admit, book.beat):
        with pytest.raises(Refused, match="epoch 2, yours is 1"):
            refuse(1)
    book.admit(0)
    book.admit(2)
    book.admit(2, changing=True)
    with pytest.raises(Refused, match="an onlooker may ask it"):
        book.admit(0, changing=True)
    clock.now += 60
    book.admit(0, changing=True)
    with pytest.raises(Refused):
        book.beat(0)


def test_two_servers_of_one_kind_get_two_folders_and_the_first_one_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    one = EngineCache.acquire("vllm", "1", ["a"])
    two = EngineCache.acquire("vllm", "1", ["a"])
    other = EngineCache.acquire("vllm", "2", ["a"])
    flags = EngineCache.acquire("vllm", "1", ["b"])
    assert len({one.path, two.path, other.path, flags.path}) == 4
    one.release()
    again = EngineCache.acquire("vllm", "1", ["a"])
    assert again.path == one.path
    for cache in (two, other, flags, again):
        cache.release()


def test_another_seed_or_share_of_memory_uses_the_same_compiled_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    paths = []
    for words in (
        ["x", "--seed", "1", "y"],
        ["x", "--seed", "2", "y"],
        ["x", "--random-seed", "3", "y"],
        ["x", "--gpu-memory-utilization", "0.41", "y"],
        ["x", "--mem-fraction-static", "0.3", "y"],
        ["x", "2", "y"],
    ):
        cache = EngineCache.acquire("vllm", "1", words)
        paths.append(cache.path)
        cache.release()
    assert len(set(paths[:-1])) == 1
    assert paths[-1] != paths[0]


def test_scratch_is_private_short_and_gone_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    mine = Scratch("0123456789abcdef")
    assert mine.path.stat().st_mode & 0o777 == 0o700
    sweep(tmp_path)
    assert mine.path.exists()
    mine.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_dead_server_left_is_swept_and_what_is_not_ours_stays(tmp_path):
    mine = f"tandem-{os.getuid()}-"
    dead = tmp_path / f"{mine}dead"
    (dead / "spool").mkdir(parents=True)
    (dead / "lock").touch()
    (tmp_path / f"{mine}died-before-it-had-a-lock").mkdir()
    others = tmp_path / "tandem-999999-x"
    others.mkdir()
    (others / "lock").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / f"{mine}link"
    link.symlink_to(elsewhere)
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {others, elsewhere, link}
    assert not list(elsewhere.iterdir())


def test_a_folder_that_is_swept_between_its_making_and_its_locking_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    sweeps = iter([lambda: sweep(tmp_path)])

    def made_and_swept(path):
        made = private_dir(path)
        next(sweeps, lambda: None)()
        return made

    monkeypatch.setattr(scratch, "private_dir", made_and_swept)
    mine = Scratch("0123456789abcdef")
    sweep(tmp_path)
    assert mine.path.exists()
    mine.remove()


def test_little_room_in_memory_sends_adapters_to_the_run_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    mine = Scratch("0123456789abcdef")
    run_dir = tmp_path / "run"
    assert mine.spool("", run_dir).is_relative_to(mine.path)
    monkeypatch.setattr(scratch, "ENOUGH_BYTES", 1 << 60)
    assert mine.spool("", run_dir) == run_dir / "spool"
    assert mine.spool(str(tmp_path / "mine"), run_dir).parent == tmp_path / "mine"
    mine.remove()


async def test_who_looks_just_then_whether_a_server_holds_a_run_directory_is_no_server(tmp_path, monkeypatch):
    (tmp_path / "server.lock").touch()
    with (tmp_path / "server.lock").open("rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: looking.close())
        async with contextlib.AsyncExitStack() as stack:
            own(tmp_path, stack)


async def test_adapters_that_a_killed_server_left_in_the_run_directory_are_not_in_the_next_ones_way(tmp_path):
    def spool():
        return Spool(tmp_path / "spool")

    spool().write("policy-v000005", memoryview(b"old"), digest(b"old"), {})
    (tmp_path / "spool" / ".canary-1").mkdir()
    async with contextlib.AsyncExitStack() as stack:
        own(tmp_path, stack)
        spool().write("policy-v000005", memoryview(b"new"), digest(b"new"), {})
        spool().write("canary-1", memoryview(b"new"), digest(b"new"), {})
        with pytest.raises(ConfigError, match="Another tandem-server"):
            own(tmp_path, stack)
        assert len(list(spool().folder.iterdir())) == 2


def test_the_configured_spool_of_a_killed_server_is_swept_by_the_next_one_of_its_host(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "MEMORY", tmp_path)
    shared = tmp_path / "shared"
    killed, lives, next_one = (Scratch(letter * 32) for letter in "abc")
    left, used = (server.spool(str(shared), tmp_path) for server in (killed, lives))
    assert used.stat().st_mode & 0o777 == 0o700
    killed.remove()  # Its locks are let go, as when it is killed; its spool stays.
    elsewhere = shared / f"tandem-{os.getuid()}-another.host-dddd"
    elsewhere.mkdir()
    found = next_one.spool(str(shared), tmp_path)
    assert set(shared.iterdir()) == {used, found, elsewhere}
    assert not left.exists()
    for server in (lives, next_one):
        server.remove()


def test_a_launchers_variables_and_growing_segments_do_not_reach_the_engine():
    dirty = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True,b:2",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # Of the trainer's group; two jobs that take it from one shell would collide.
        "TORCHELASTIC_RUN_ID": "x",
        "PYTHONPATH": "/x",
        "OMP_NUM_THREADS": "1",
        "KEPT": "yes",
    }
    assert cleaned(dirty, "cuda").keys() == {"PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "KEPT", "PATH"}
    assert cleaned(dirty, "cuda")["PYTORCH_ALLOC_CONF"] == "a:1,b:2"
    assert "OMP_NUM_THREADS" not in cleaned(dirty, "cpu")


def test_the_engine_finds_the_programs_of_its_environment_before_the_systems(tmp_path, monkeypatch):
    """ninja, above all: the environment need not be activated, and its python is a link out of it."""
    own, system = tmp_path / "env" / "bin", tmp_path / "system"
    for folder in (own, system):
        folder.mkdir(parents=True)
        (folder / "ninja").touch(mode=0o755)
    (own / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    for before in (f"{system}", f"{system}:{own}", f"{own}:{system}"):
        path = cleaned({"PATH": before}, "cuda")["PATH"]
        assert path == f"{own}:{system}"
        assert shutil.which("ninja", path=path) == str(own / "ninja")
    assert cleaned({}, "cpu")["PATH"] == f"{own}:{os.defpath}"


@pytest.mark.parametrize("address", ["0.0.0.0:80", "10.0.0.1:80", "example.org:80", "127.0.0.1", "127.0.0.1:x", "*:80"])
def test_the_http_port_is_never_open_to_the_network(address):
    with pytest.raises(ConfigError):
        loopback(address, "server.http")


def test_loopback_has_several_names():
    for name in ("127.0.0.1:0", "localhost:0", ":0"):
        assert loopback(name, "server.http") == ("127.0.0.1", 0)


def test_a_file_is_read_with_overrides(tmp_path):
    path = tmp_path / "server.toml"
    path.write_text('[server]\nmodel = "m"\nkeep_server_s = 9\n')
    server = load(path, ["server.seed=4", "server.listen=tcp://127.0.0.1:5"]).server
    assert (server.seed, server.keep_server_s, server.listen) == (4, 9.0, "tcp://127.0.0.1:5")


@pytest.mark.parametrize(
    ("server", "named"),
    [
        ({"adapter_slots": 2}, "server.adapter_slots"),
        ({"max_staleness": 4, "adapter_slots": 5}, "server.adapter_slots"),
        ({"adapters_held": 3}, "server.adapters_held"),
        ({"http": "0.0.0.0:80"}, "server.http"),
        ({"metrics_address": "10.0.0.1:9400"}, "server.metrics_address"),
        ({"cuda_graphs": "no"}, "server.cuda_graphs"),
        ({"max_in_flight": 0}, "server.max_in_flight"),
        ({"seeed": 1}, "server.seeed"),
    ],
)
def test_wrong_settings_are_named_by_their_key(server, named):
    with pytest.raises(ConfigError, match=named):
        from_dict({"server": {"model": "m", **server}}, "test")


def test_defaults_hold_the_versions_in_flight():
    file = from_dict({"server": {"model": "m"}}, "test")
    assert isinstance(file, ServerFile)
    assert file.server.slots == 3
    assert file.server.held > file.server.slots
