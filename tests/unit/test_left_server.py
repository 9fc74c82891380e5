"""Whether the server that a run's last trainer has left will do for the next one."""

import fcntl
from pathlib import Path

import msgspec
import pytest

from trainer_env import config as configs
from trainer_env.devices import Device, Devices
from trainer_env.memory_share import ModelSize
from trainer_env.placement import Placement, plan
from trainer_env.serving import left_server
from trainer_env.serving.left_server import Started, differences, held, read
from trainer_env.serving.server_settings import server_settings, what_matters


def started(*overrides, **changes):
    config = configs.load(Path("configs/demo.toml"), ['run="run"', *overrides])
    placement = plan(config.placement, Devices(cores=2))
    settings = what_matters(server_settings(config, "model", placement), config)
    one = Started(pid=1, started=2, program="/p", environment={"OMP_NUM_THREADS": "1"}, settings=settings)
    return msgspec.structs.replace(one, **changes)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def test_one_with_the_same_settings_will_do():
    assert differences(started(), started()) == []


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["seed=5"], ["server.seed"]),
        (["lora.r=4"], ["server.max_lora_rank"]),
        (['model.dtype="float32"', "server.keep_server_s=9"], ["server.dtype", "server.keep_server_s"]),
        (["vllm.max_num_seqs=7"], ["vllm.max_num_seqs"]),
        (['server.backend="sglang"'], ["server.backend", "sglang", "vllm"]),
        (["server.engine_env.A=1"], ["server.engine_env"]),
        (["server.memory_share=0.5"], ["server.memory_share"]),
    ],
)
def test_settings_that_differ_are_named(overrides, keys):
    overrides = [word.replace("A=1", 'A="1"') for word in overrides]
    assert differences(started(), started(*overrides)) == keys


@pytest.mark.parametrize(
    "override",
    ["grpo.learning_rate=1e-4", "grpo.max_steps=99", "sglang.x=1", "server.startup_timeout_s=5", "rollout.timeout_s=5"],
)
def test_what_the_server_does_not_do_does_not_matter(override):
    assert differences(started(), started(override)) == []


def test_another_environment_and_other_devices_are_named():
    assert differences(started(), started(program="/q")) == ["its environment"]
    assert differences(started(), started(environment={})) == ["its devices or threads"]


def test_memory_that_was_planned_from_what_was_free_does_not_matter():
    config = configs.load(Path("configs/demo.toml"), ['run="run"'])
    settings = server_settings(config, "model", plan(config.placement, Devices(cores=2)))
    one, two = ({**settings, "server": settings["server"] | {"memory_share": share}} for share in (0.5, 0.6))
    assert what_matters(one, config) == what_matters(two, config)


def test_what_was_written_is_read_and_is_private(tmp_path):
    assert read(tmp_path) is None
    one = started()
    one.write(tmp_path)
    assert read(tmp_path) == one
    assert (tmp_path / left_server.RECORD).stat().st_mode & 0o777 == 0o600
    (tmp_path / left_server.RECORD).write_text("{")
    assert read(tmp_path) is None


def test_a_folder_is_held_while_its_lock_is(tmp_path):
    assert not held(tmp_path)
    with (tmp_path / "server.lock").open("w") as lock:
        assert not held(tmp_path)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert held(tmp_path)
    assert not held(tmp_path)


GIB = 2**30
ONE_GPU = Device(id="0", uuid="GPU-1", total_bytes=80 * GIB, free_bytes=79 * GIB)


def taken(gib: int) -> Devices:
    """The machine while somebody holds so much of its GPU."""
    return Devices(gpus=(msgspec.structs.replace(ONE_GPU, free_bytes=(79 - gib) * GIB),), cores=8)


def planned(devices: Devices, tmp_path: Path) -> Placement:
    config = configs.load(Path("configs/demo.toml"), [])
    return plan(config.placement, left_server.as_it_was_planned(devices, tmp_path), model=ModelSize(2**30))


def test_whoever_goes_on_with_a_server_plans_as_it_was_planned_for(tmp_path):
    first = planned(taken(0), tmp_path)
    assert first.mode == "shared"
    started(free_bytes=first.free_bytes()).write(tmp_path)
    (tmp_path / "server.lock").touch()
    assert planned(taken(56), tmp_path).mode == "time-share"  # Somebody else's memory: that server is gone.
    with (tmp_path / "server.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert planned(taken(56), tmp_path) == first


def test_a_record_without_the_free_memory_is_planned_with_what_is_free(tmp_path):
    started().write(tmp_path)
    with (tmp_path / "server.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert planned(taken(56), tmp_path).mode == "time-share"
