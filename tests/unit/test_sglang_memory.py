"""SGLang counts its memory from what is free as it starts: its flag comes to the share that it was given, each time."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bridge.errors import ConfigError, EngineFailed
from server_env.config import ServerConfig
from server_env.engines.backends import NOWHERE
from server_env.engines.engine import GpuMemory
from server_env.engines.sglang import SGLangConfig
from server_env.engines.sglang_http import SGLang
from server_env.engines.sglang_memory import measured
from server_env.gpus import gpu_memory
from server_env.supervision.engine_process import EngineProcess
from trainer_env.config import PlacementConfig
from trainer_env.devices import Device, Devices
from trainer_env.memory_share import ModelSize
from trainer_env.placement import plan

GIB = 2**30
FLAG = "--mem-fraction-static"


def gpu(free, total=140):
    return GpuMemory(int(free * GIB), total * GIB)


def fraction(*gpus, native=None, device="cuda", **section):
    """The flag's value on GPUs of which so much is free; None: not passed."""
    settings = {"model": "m", "engine_command": ["x"], "backend": "sglang", "memory_share": 0.5, **section}
    server, options = msgspec.convert(settings, ServerConfig), msgspec.convert(native or {}, SGLangConfig)
    line = SGLang(server, options, device, None).command(replace(NOWHERE, gpus=gpus))
    return float(line[line.index(FLAG) + 1]) if FLAG in line else None


@pytest.mark.parametrize(
    ("free", "total", "share", "static"),
    [
        (139, 140, 0.3, 42 - 6),
        (70, 140, 0.3, 42 - 6),  # A restart beside a trainer that holds half of it.
        (30, 140, 0.3, 30 - 6),  # Which holds more than it was expected to.
        (79, 80, 0.33, 26.4 - 6),
        (39, 40, 0.53, 21.2 - 4),
        (139, 140, 0.04, 2.8),  # By hand, for a small model.
    ],
)
def test_weights_and_cache_get_the_share_less_what_comes_on_top_whatever_is_free(free, total, share, static):
    assert measured(share, [gpu(free, total)]) * free == pytest.approx(static, abs=0.2)


def test_the_flag_is_made_anew_for_each_life():
    assert fraction(gpu(140)) == pytest.approx(64 / 140, abs=0.001)
    assert fraction(gpu(80)) == pytest.approx(64 / 80, abs=0.001)


def test_the_fullest_of_an_engines_own_gpus_decides():
    visible = gpu(10), gpu(140), gpu(90), gpu(20)
    native = {"base_gpu_id": 1, "tp_size": 2}
    assert fraction(*visible, native=native) == fraction(gpu(90), gpu(140), tensor_parallel=2) == fraction(gpu(140))
    assert fraction(gpu(100), nnodes=2, tensor_parallel=2, dist_init_addr="h:1", spool_dir="/s") == 0.64


def test_gpus_of_which_the_driver_says_nothing_get_the_share_less_a_tenth():
    assert fraction() == fraction(gpu(140), tensor_parallel=2) == 0.4


def test_what_is_set_by_hand_stays():
    assert fraction(gpu(100), native={"mem_fraction_static": 0.77}) == 0.77
    assert fraction(gpu(100), memory_share=None) is None
    assert fraction(gpu(100), device="cpu") is None


@pytest.mark.parametrize(("free", "share"), [(0, 0.5), (0.4, 0.5), (140, 0.003)])
def test_no_room_for_anything_is_refused_with_figures(free, share):
    with pytest.raises(EngineFailed) as refused:
        measured(share, [gpu(140), gpu(free)])
    assert f"of which {free:.1f} are free" in refused.value.why
    assert "server.memory_share" in refused.value.remedy


async def test_an_engine_is_told_what_is_free_as_each_life_begins_and_its_log_says_why_there_is_none(
    tmp_path, monkeypatch
):
    class Refusing:
        def __init__(self):
            self.seen = []

        def environment(self, *_):
            return {"CUDA_VISIBLE_DEVICES": "1"}

        def command(self, endpoint):
            self.seen.append(endpoint.gpus)
            raise EngineFailed("There is no room.", why="It is full.")

    monkeypatch.setattr(gpu_memory, "of_each", lambda environment: (environment["CUDA_VISIBLE_DEVICES"],))
    (tmp_path / "scratch").mkdir()
    engine: Any = Refusing()
    process = EngineProcess(
        engine,
        device="cuda",
        scratch=tmp_path / "scratch",
        cache=tmp_path,
        log_path=tmp_path / "engine.log",
        environment={"CUDA_VISIBLE_DEVICES": "0,1"},
    )
    for _ in range(2):
        with pytest.raises(EngineFailed, match="no room"):
            await process.start(60)
    assert engine.seen == [("1",), ("1",)]
    assert process.log_path.read_text().splitlines() == [
        "--- life 1: There is no room. It is full.",
        "--- life 2: There is no room. It is full.",
    ]


def planned(total, free, weights, backend, **settings):
    device = Device(id="0", total_bytes=total * GIB, free_bytes=int(free * GIB))
    model = ModelSize(int(weights * GIB), in_4bit=settings.pop("in_4bit", False))
    return plan(PlacementConfig(**settings), Devices(gpus=(device,)), model=model, server={"backend": backend})


@pytest.mark.parametrize(
    ("total", "free", "weights", "settings"),
    [
        (140, 139, 27.5, {"mode": "shared"}),
        (80, 79.6, 14.2, {"mode": "shared"}),
        (40, 39.6, 14.2, {"mode": "time-share"}),
        (48, 47.6, 28, {"mode": "time-share", "in_4bit": True}),
        (140, 20, 0.3, {"mode": "time-share"}),
    ],
)
def test_a_model_that_the_placement_accepts_has_room_for_its_weights_and_a_cache(total, free, weights, settings):
    placement = planned(total, free, weights, "sglang", **settings)
    assert placement.memory_share is not None
    assert measured(placement.memory_share, [gpu(free, total)]) * free >= weights + 1.9


def test_the_placement_counts_what_sglang_leaves_free_and_vllm_does_not():
    settings = {"mode": "time-share", "in_4bit": True}
    assert planned(24, 23.6, 14.2, "vllm", **settings).memory_share == pytest.approx(0.7, abs=0.011)
    with pytest.raises(ConfigError, match=r"take 18\.6"):
        planned(24, 23.6, 14.2, "sglang", **settings)
