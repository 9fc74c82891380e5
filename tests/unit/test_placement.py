"""Which devices each half gets: plans for machines that need not be here."""

# ruff: noqa: N802 (the stand-in for NVML has the names of NVML)

import dataclasses
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import ConfigError
from trainer_env import devices as detection
from trainer_env import training
from trainer_env.config import PlacementConfig
from trainer_env.devices import Device, Devices
from trainer_env.memory_share import ModelSize
from trainer_env.placement import plan
from trainer_env.training import Training

GIB = 2**30


def gpu(index, free=130.0, holders=()):
    return Device(
        id=str(index),
        uuid=f"GPU-{index}a{index}b-0000",
        name="NVIDIA H200",
        total_bytes=140 * GIB,
        free_bytes=int(free * GIB),
        holders=holders,
    )


def machine(count, visible=None, **settings):
    return Devices(gpus=tuple(gpu(index) for index in range(count)), visible=visible, cores=8, **settings)


def ids(placement):
    return [device.id for device in placement.server], [device.id for device in placement.trainer]


def refusal(devices, **settings):
    with pytest.raises(ConfigError) as refused:
        plan(PlacementConfig(**settings), devices)
    return str(refused.value)


@pytest.mark.parametrize(
    ("count", "mode", "server", "trainer"),
    [
        (0, "cpu", [], []),
        (1, "time-share", ["0"], ["0"]),
        (2, "split", ["0"], ["1"]),
        (4, "split", ["0"], ["1", "2", "3"]),
    ],
)
def test_what_is_there_decides(count, mode, server, trainer):
    placement = plan(PlacementConfig(), machine(count))
    assert placement.mode == mode
    assert ids(placement) == (server, trainer)


def test_a_process_trains_on_each_gpu_of_the_trainers():
    assert [plan(PlacementConfig(), machine(count)).ranks for count in (0, 1, 2, 4)] == [1, 1, 1, 3]
    on_cpu = plan(PlacementConfig(trainer_ranks=2), machine(0))
    assert (on_cpu.ranks, on_cpu.trainer_threads) == (2, 4)
    assert "4 threads for each of 2 processes" in "\n".join(on_cpu.lines())


def test_another_number_of_processes_than_gpus_is_refused_and_the_same_is_as_if_it_were_left_out():
    for count, ranks in ((1, 2), (2, 2), (4, 2), (4, 4)):
        message = refusal(machine(count), trainer_ranks=ranks)
        assert f"placement.trainer_ranks: {ranks} processes are asked for" in message
    assert "GPUs: 1, 2, 3." in refusal(machine(4), trainer_ranks=1)
    for count, ranks in ((1, 1), (2, 1), (4, 3)):
        assert plan(PlacementConfig(trainer_ranks=ranks), machine(count)) == plan(PlacementConfig(), machine(count))


@pytest.mark.parametrize(
    ("visible", "usable"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        (" 3 , 1 ", ["3", "1"]),
        ("1,-1,2", ["1"]),
        ("1,9,2", ["1"]),
        ("1,1", ["1"]),
        ("GPU-2a2b-0000,0", ["2", "0"]),
        ("GPU-2a", ["2"]),
        ("2,GPU-2a2b-0000", ["2"]),
        ("MIG-4f1c-77", ["MIG-4f1c-77"]),
        ("MIG-GPU-2a2b-0000/1/0", ["MIG-GPU-2a2b-0000/1/0"]),
    ],
)
def test_visible_devices_are_opaque_ids(visible, usable):
    assert [device.id for device in machine(4, visible).usable()] == usable


def cut(*gpus, visible=None):
    """A machine whose GPUs have so many slices each; of none it is whole."""
    devices = []
    for index, slices in enumerate(gpus):
        devices += [
            Device(id=f"MIG-{index}{place}", uuid=f"MIG-{index}{place}", part_of=str(index)) for place in range(slices)
        ]
        devices += [] if slices else [gpu(index)]
    return Devices(gpus=tuple(devices), visible=visible, cores=8)


@pytest.mark.parametrize(
    ("slices", "mode", "server", "trainer"),
    [
        ((1,), "time-share", ["MIG-00"], ["MIG-00"]),
        ((3,), "split", ["MIG-00"], ["MIG-01"]),
        ((2, 2), "split", ["MIG-00"], ["MIG-01"]),
        ((0, 2), "split", ["0"], ["MIG-10"]),
        ((2, 0, 0), "split", ["MIG-00"], ["1", "2"]),
    ],
)
def test_a_process_computes_on_one_slice(slices, mode, server, trainer):
    placement = plan(PlacementConfig(), cut(*slices))
    assert placement.mode == mode
    assert ids(placement) == (server, trainer)


def test_the_index_of_a_gpu_that_is_cut_stands_for_its_slices():
    assert [device.id for device in cut(3, visible="0").usable()] == ["MIG-00", "MIG-01", "MIG-02"]
    assert [device.id for device in cut(0, 2, visible="1,0,2").usable()] == ["MIG-10", "MIG-11", "0"]
    assert plan(PlacementConfig(), cut(3, visible="0")).mode == "split"


def test_slices_that_were_to_compute_together_are_refused():
    message = refusal(cut(4), server_gpus=("MIG-00",), trainer_gpus=("MIG-01", "MIG-02"))
    assert "the trainer is to compute on MIG-01, MIG-02 together" in message
    several = plan(PlacementConfig(server_gpus=("MIG-00", "MIG-01")), cut(4))
    with pytest.raises(ConfigError, match="the server is to compute on MIG-00, MIG-01 together"):
        several.server_settings()
    assert several.server_settings({"data_parallel": 2})["tensor_parallel"] == 1


def test_visible_devices_name_nothing_on_a_machine_without_a_driver():
    assert plan(PlacementConfig(), machine(0, visible="0")).mode == "cpu"


def test_an_empty_list_of_visible_devices_means_the_cpu():
    assert plan(PlacementConfig(), machine(2, visible="")).mode == "cpu"


def test_visible_devices_are_shared_out_in_their_order():
    assert ids(plan(PlacementConfig(), machine(4, visible="3,1,0"))) == (["3"], ["1", "0"])


def test_flags_win_over_visible_devices():
    settings = PlacementConfig(server_gpus=(3,), trainer_gpus=("0", "GPU-1a1b-0000"))
    placement = plan(settings, machine(4, visible="2"))
    assert ids(placement) == (["3"], ["0", "1"])
    assert placement.trainer_environment()["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_one_flag_leaves_the_rest_to_the_other_half():
    assert ids(plan(PlacementConfig(server_gpus=(1,)), machine(3))) == (["1"], ["0", "2"])
    assert ids(plan(PlacementConfig(trainer_gpus=(0,)), machine(3))) == (["1"], ["0"])


@pytest.mark.parametrize("other", [0, "0", "GPU-0a0b-0000", "GPU-0a0b"])
def test_an_overlap_is_an_error_by_whatever_name(other):
    message = refusal(machine(2), server_gpus=(0,), trainer_gpus=(other,))
    assert "GPU 0 is named for both halves" in message
    assert "--placement time-share" in message


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (1, {"mode": "split"}, "split needs a GPU for each half, and there is none left for the trainer (visible: 0)"),
        (1, {"trainer_gpus": (0,)}, "none left for the server"),
        (0, {"mode": "split"}, "none is visible"),
        (0, {"mode": "time-share"}, "none is visible"),
        (0, {"accelerator": "cuda"}, "none is visible"),
        (2, {"server_gpus": (5,)}, "placement.server_gpus: there is no GPU 5; there are: 0, 1"),
        (2, {"trainer_gpus": (1, 1)}, "placement.trainer_gpus: names a GPU twice"),
        (2, {"mode": "time-share", "server_gpus": (0,), "trainer_gpus": (1,)}, "time-share uses one GPU"),
        (2, {"mode": "cpu", "server_gpus": (0,)}, "GPUs are named for a run on the CPU"),
        (2, {"mode": "split", "accelerator": "cpu"}, "split shares out GPUs"),
        (2, {"mode": "cpu", "accelerator": "cuda"}, "cpu uses no GPU"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(count, settings, expected):
    assert expected in refusal(machine(count), **settings)


def test_environments_for_the_cpu_use_no_gpu():
    devices = machine(2, cpu_build=True)
    assert plan(PlacementConfig(), devices).mode == "cpu"
    for settings in ({"mode": "split"}, {"accelerator": "cuda"}, {"server_gpus": (0,)}):
        assert "setup_envs.sh --accelerator cuda" in refusal(devices, **settings)


@pytest.mark.parametrize("settings", [{}, {"server_gpus": (1,)}, {"server_gpus": (1,), "trainer_gpus": ("GPU-1a1b",)}])
def test_time_share_uses_one_gpu_for_both(settings):
    placement = plan(PlacementConfig(mode="time-share", **settings), machine(2))
    assert ids(placement) == ((["1"], ["1"]) if settings else (["0"], ["0"]))
    assert placement.server_settings() == {"device": "cuda", "tensor_parallel": 1, "memory_share": 0.6, "sleep": True}


@pytest.mark.parametrize(
    ("free", "settings", "model_gib", "mode", "share"),
    [
        (130, {}, 3, "shared", 0.6),
        (130, {}, None, "time-share", 0.6),  # Nobody knows what the trainer needs.
        (130, {"trainer_gib": 40.0}, None, "shared", 0.59),
        (130, {}, 30, "time-share", 0.6),
        (70, {}, 3, "shared", 0.34),
        (40, {}, 3, "time-share", 0.2),
        (130, {"mode": "time-share"}, 3, "time-share", 0.6),
        (130, {"mode": "shared"}, 20, "shared", 0.4),
        (130, {"mode": "shared"}, None, "shared", 0.6),
    ],
)
def test_one_gpu_is_shared_without_turns_when_both_halves_are_known_to_fit(free, settings, model_gib, mode, share):
    devices = Devices(gpus=(gpu(0, free),))
    model = None if model_gib is None else ModelSize(model_gib * GIB)
    placement = plan(PlacementConfig(**settings), devices, model=model)
    assert placement.mode == mode
    assert placement.memory_share == pytest.approx(share, abs=0.011)
    assert placement.server_settings().get("sleep", False) is (mode == "time-share")


SEVEN_B = ModelSize(int(14.2 * GIB))


def one_gpu(gib, **settings):
    device = Device(id="0", total_bytes=gib * GIB, free_bytes=int((gib - 0.4) * GIB))
    return Devices(gpus=(device,)), PlacementConfig(**settings)


@pytest.mark.parametrize(
    ("gib", "model", "mode", "at_least"),
    [
        (80, SEVEN_B, "shared", 20),
        (48, SEVEN_B, "time-share", 20),
        (40, SEVEN_B, "time-share", 18),
        (24, SEVEN_B._replace(in_4bit=True), "time-share", 16.3),
    ],
)
def test_the_engine_gets_what_a_model_needs_and_the_trainer_keeps_its_weights_beside_it(gib, model, mode, at_least):
    devices, config = one_gpu(gib)
    placement = plan(config, devices, model=model)
    assert placement.mode == mode
    assert placement.memory_share is not None
    engine = placement.memory_share * gib
    assert engine >= at_least
    assert engine + model.trained / GIB <= gib - 2


@pytest.mark.parametrize(
    ("gib", "model", "settings", "expected"),
    [
        (24, SEVEN_B, {}, "model.load_in_4bit=true"),
        (16, SEVEN_B._replace(in_4bit=True), {}, "a smaller model or a second GPU"),
        (48, SEVEN_B, {"mode": "shared"}, "--placement time-share"),
    ],
)
def test_a_model_that_does_not_fit_one_gpu_is_refused_with_figures(gib, model, settings, expected):
    devices, config = one_gpu(gib, **settings)
    with pytest.raises(ConfigError) as refused:
        plan(config, devices, model=model)
    assert expected in str(refused.value)
    assert f"take {model.weights / GIB + 2:.1f}" in str(refused.value)
    assert plan(config, devices, model=model, server={"memory_share": 0.5}).mode != "split"  # By hand: as they say.


def test_the_engine_is_sized_from_free_memory():
    def share(*free):
        devices = Devices(gpus=tuple(gpu(index, size) for index, size in enumerate([*free, 140])))
        return plan(PlacementConfig(server_gpus=tuple(range(len(free)))), devices).memory_share

    assert share(140) is None  # Its own choice: it knows what the rest is for.
    assert share(70) == 0.45
    assert share(140, 70) == 0.45
    assert share(7.1) == 0.01


def test_a_gpu_of_unknown_size_leaves_the_share_to_the_engine():
    placement = plan(PlacementConfig(), machine(2, visible="MIG-a,MIG-b"))
    assert ids(placement) == (["MIG-a"], ["MIG-b"])
    assert placement.memory_share is None
    assert "memory_share" not in placement.server_settings()


def test_a_full_gpu_is_refused_with_its_holder():
    devices = Devices(gpus=(gpu(0, 0.5, holders=("pid 77 (python, 139.0 GiB)",)), gpu(1)))
    message = refusal(devices)
    assert "GPU 0 has 0.5 GiB free" in message
    assert "pid 77 (python, 139.0 GiB)" in message


def test_each_half_sees_its_own_devices_in_the_order_of_nvidia_smi():
    placement = plan(PlacementConfig(), machine(3))
    assert placement.server_environment() == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert placement.trainer_environment() == {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_several_server_gpus_make_one_engine():
    placement = plan(PlacementConfig(server_gpus=(0, 1)), machine(4))
    assert placement.server_settings() == {"device": "cuda", "tensor_parallel": 2, "memory_share": 0.87}


def test_a_server_of_several_engines_takes_as_many_gpus_as_they_need_and_shares_them_out():
    two, of_two = {"data_parallel": 2}, {"data_parallel": 2, "tensor_parallel": 2}
    assert ids(plan(PlacementConfig(), machine(8), server=two)) == (["0", "1"], ["2", "3", "4", "5", "6", "7"])
    assert ids(plan(PlacementConfig(), machine(8), server=of_two))[0] == ["0", "1", "2", "3"]
    assert ids(plan(PlacementConfig(), machine(8), server={"tensor_parallel": 4}))[0] == ["0", "1", "2", "3"]
    four = plan(PlacementConfig(server_gpus=(0, 1, 2, 3)), machine(8))
    assert four.server_settings(two)["tensor_parallel"] == 2
    assert four.server_settings(of_two)["tensor_parallel"] == 2
    assert four.server_settings({"nnodes": 2})["tensor_parallel"] == 8


@pytest.mark.parametrize(
    ("gpus", "server"),
    [(3, {"data_parallel": 2}), (3, {"data_parallel": 2, "tensor_parallel": 2}), (1, {"data_parallel": 2})],
)
def test_gpus_that_do_not_come_out_even_are_refused_by_the_name_of_the_setting(gpus, server):
    placement = plan(PlacementConfig(server_gpus=tuple(range(gpus))), machine(8), server=server)
    with pytest.raises(ConfigError, match=rf"server\.data_parallel: 2 engines .* the server has {gpus}"):
        placement.server_settings(server)


@pytest.mark.parametrize(
    ("settings", "wanted", "expected"),
    [
        ({"server_gpus": (0,)}, 4, "it is 4, and the number of the server's GPUs is 1."),
        ({"server_gpus": (0, 1)}, 1, "it is 1, and the number of the server's GPUs is 2."),
        ({"mode": "time-share"}, 2, "time-share uses one GPU"),
        ({"mode": "shared"}, 2, "shared uses one GPU"),
    ],
)
def test_one_engine_of_another_number_of_gpus_than_the_servers_is_refused(settings, wanted, expected):
    server = {"tensor_parallel": wanted}
    placement = plan(PlacementConfig(**settings), machine(8), server=server)
    with pytest.raises(ConfigError, match=r"server\.tensor_parallel: ") as refused:
        placement.server_settings(server)
    assert expected in str(refused.value)
    assert placement.server_settings({**server, "nnodes": 2})  # That each machine has its part, the server half checks.


@pytest.mark.parametrize(
    ("settings", "overlap", "server", "trainer"),
    [
        ({}, False, None, "8"),
        ({}, True, "4", "4"),
        ({"server_threads": 3, "trainer_threads": 2}, False, "3", "2"),
        ({"trainer_threads": 6}, True, "4", "6"),
    ],
)
def test_the_halves_share_the_cores_or_take_turns(settings, overlap, server, trainer):
    placement = plan(PlacementConfig(**settings), machine(0), overlap=overlap)
    assert placement.server_environment().get("OMP_NUM_THREADS") == server
    assert placement.trainer_environment()["OMP_NUM_THREADS"] == trainer
    assert placement.server_environment()["CUDA_VISIBLE_DEVICES"] == ""
    assert placement.server_settings() == {"device": "cpu"}


def test_one_core_is_enough_for_a_plan():
    placement = plan(PlacementConfig(), Devices(cores=1), overlap=True)
    assert (placement.server_threads, placement.trainer_threads) == (1, 1)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_plan_is_told_in_a_few_lines_and_kept_as_json(count):
    placement = plan(PlacementConfig(), machine(count))
    text = "\n".join(placement.lines())
    assert text.startswith(f"placement  {placement.mode}")
    assert text.count("NVIDIA H200, 130.0 of 140.0 GiB free") == count
    assert json.loads(placement.to_json())["mode"] == placement.mode


@pytest.mark.parametrize(
    ("quota", "expected"), [("150000 100000", 2), ("max 100000", None), ("50000 100000", 1), ("", None), ("x y", None)]
)
def test_a_containers_quota_counts_as_its_cores(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    path = tmp_path / "cpu.max"
    path.write_text(quota)
    assert detection.available_cores(path) == (expected or 16)
    assert detection.available_cores(tmp_path / "none") == 16


class Nvml:
    """The driver's library for a machine with a whole GPU and one that is cut into two slices."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVMLError = type("NVMLError", (Exception,), {})

    def __init__(self, *, driver=True):
        self.driver, self.open = driver, 0

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return f"GPU-{index}"

    def nvmlDeviceGetMigMode(self, handle):
        if handle == "GPU-0":
            raise self.NVMLError
        return (1, 1)

    def nvmlDeviceGetMaxMigDeviceCount(self, _):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, _, place):
        if place > 1:
            raise self.NVMLError
        return f"MIG-{place}"

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return f"name of {handle}"

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        if handle.startswith("MIG"):
            raise self.NVMLError
        return [7, 5]

    def nvmlDeviceGetMemoryInfo(self, _):
        return SimpleNamespace(total=80 * GIB, free=79 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=2**30, usedGpuMemory=GIB)] if handle == "GPU-0" else []


def test_detection_asks_the_driver_and_lets_go_of_it(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = detection.detect({"CUDA_VISIBLE_DEVICES": "MIG-1"})
    assert [(device.id, device.name) for device in found.gpus] == [
        ("0", "name of GPU-0"),
        ("MIG-0", "name of MIG-0"),
        ("MIG-1", "name of MIG-1"),
    ]
    assert [device.part_of for device in found.gpus] == ["", "1", "1"]
    assert found.gpus[0].holders == (f"pid {2**30} (a process of another container, 1.0 GiB)",)
    assert [device.capability for device in found.gpus] == [(7, 5), None, None]
    assert found.visible == "MIG-1"
    assert nvml.open == 0


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMemoryInfo"])
def test_a_gpu_that_does_not_answer_is_left_out_and_said(monkeypatch, call):
    nvml = Nvml()
    answer = getattr(nvml, call)

    def lost(which):
        if which in (0, "GPU-0"):
            raise nvml.NVMLError("GPU is lost")
        return answer(which)

    monkeypatch.setattr(nvml, call, lost)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = detection.detect({})
    assert [device.id for device in found.gpus] == ["MIG-0", "MIG-1"]
    assert nvml.open == 0
    for settings in (PlacementConfig(), PlacementConfig(mode="cpu")):
        assert "GPU 0 does not answer: GPU is lost" in plan(settings, found).lines()[-1]


def test_a_gpu_without_memory_of_its_own_is_one_of_unknown_size(monkeypatch):
    nvml = Nvml()
    error = nvml.NVMLError("Not Supported")
    error.value = nvml.NVML_ERROR_NOT_SUPPORTED  # pyright: ignore[reportAttributeAccessIssue]

    def memory(_):
        raise error

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", memory)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    first = detection.detect({}).gpus[0]
    assert (first.id, first.total_bytes, first.free_bytes) == ("0", None, None)


def test_detection_without_a_driver_finds_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(driver=False))
    assert detection.detect({}).gpus == ()


TWO_GPUS = (gpu(0), gpu(1))


@pytest.fixture
def two_gpus(monkeypatch):
    """A process of the user's, on a machine with two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # Whatever is set in the test is taken back.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(detection, "_gpus", lambda: (TWO_GPUS, ()))
    monkeypatch.setattr(detection, "_torch_version", lambda: "2.0+cu128")
    monkeypatch.setattr(detection, "_confined", None)
    return monkeypatch


def planned():
    return plan(PlacementConfig(), detection.detect())


def test_a_process_that_has_trained_plans_its_next_run_as_its_first(two_gpus):
    first = planned()
    assert first.mode == "split"
    for _ in range(2):
        detection.confine(first.trainer_environment())
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        assert planned() == first


def test_a_training_leaves_the_process_as_it_was_to_whoever_plans(two_gpus, tmp_path):
    grpo = SimpleNamespace(import_unsloth=lambda: None, load_policy=lambda *_: "policy")
    two_gpus.setitem(sys.modules, "trainer_env.training.grpo", grpo)
    two_gpus.setattr(training, "grpo", grpo, raising=False)  # Where it has been imported before.
    first = planned()
    nothing: Any = SimpleNamespace(run_dir=tmp_path, ending=False, status=lambda _: None)
    fields = {field.name: nothing for field in dataclasses.fields(Training)}
    assert Training(**{**fields, "placement": first})._load_policy() == "policy"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert planned() == first


def test_what_the_user_hides_stays_hidden_when_the_process_has_trained(two_gpus):
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first = planned()
    detection.confine(first.trainer_environment())
    assert planned() == first
    two_gpus.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert planned().mode == "time-share"
