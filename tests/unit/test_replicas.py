"""What several engines of one server share out or put together: GPUs, slots, figures."""

import pytest

from bridge.errors import ConfigError
from server_env.config import ServerConfig
from server_env.gpus import shares, visible
from server_env.supervision.slots import Slots


@pytest.mark.parametrize(
    ("value", "expected"), [("0,1", ["0", "1"]), ("GPU-a, MIG-b", ["GPU-a", "MIG-b"]), ("", []), ("2,-1,3", ["2"])]
)
def test_what_is_visible_is_what_cuda_takes_the_variable_to_mean(value, expected):
    assert visible({"CUDA_VISIBLE_DEVICES": value}) == expected


def test_without_the_variable_all_gpus_of_the_driver_are_visible(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: GPU-a)'; echo '  MIG 1g'; echo 'GPU 1: X (UUID: GPU-b)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert visible({}) == ["0", "1"]


def test_gpus_are_dealt_out_in_their_order_and_none_twice():
    server = ServerConfig(data_parallel=2)
    found = shares(server, "cuda", 2, {"CUDA_VISIBLE_DEVICES": "3,1,GPU-a,0,7"})
    assert [share["CUDA_VISIBLE_DEVICES"] for share in found] == ["3,1", "GPU-a,0"]


def test_a_single_engine_and_engines_without_gpus_see_what_the_server_sees():
    assert shares(ServerConfig(), "cuda", 4, {"CUDA_VISIBLE_DEVICES": ""}) == [{}]
    assert shares(ServerConfig(data_parallel=3), "cpu", 1, {}) == [{}, {}, {}]


def test_gpus_that_would_be_the_same_for_all_engines_are_refused():
    server = ServerConfig(data_parallel=2, engine_env={"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(ConfigError, match=r"server\.engine_env: CUDA_VISIBLE_DEVICES"):
        shares(server, "cuda", 1, {})


def test_a_slot_is_an_adapters_and_the_base_model_needs_none():
    freed = []
    slots = Slots(1, lambda: freed.append(True))
    with slots.taken("a"), slots.taken(""):
        with slots.taken("a"):
            assert [slots.room_for(name) for name in ("a", "b", "")] == [True, False, True]
        assert not freed
    assert freed == [True]
    assert slots.room_for("b")
