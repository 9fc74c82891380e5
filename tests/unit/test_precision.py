"""The number format of the base weights, where the config leaves it to the machine."""

from pathlib import Path

import msgspec
import pytest

from trainer_env import config
from trainer_env.devices import Device, Devices
from trainer_env.models import precision
from trainer_env.placement import Placement, plan

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"
WITH = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs\t\t:\n"
WITHOUT = "processor\t: 0\nflags\t\t: fpu avx2 bf16_in_the_name_of_another\nbugs\t\t: avx512_bf16\n"


@pytest.fixture(params=[WITH, WITHOUT, ""], ids=["with", "without", "nothing said"])
def cpu(request, tmp_path, monkeypatch) -> bool:
    """A machine; whether its CPU has instructions for bfloat16."""
    (tmp_path / "cpuinfo").write_text(request.param)
    monkeypatch.setattr(precision, "computes_bfloat16", lambda: computes(tmp_path / "cpuinfo"))
    return request.param == WITH


computes = precision.computes_bfloat16


def placed(*, on_gpu: bool, capabilities=(None, None)) -> Placement:
    found = (Device(id=str(place), capability=capability) for place, capability in enumerate(capabilities))
    gpus = tuple(found) if on_gpu else ()
    return plan(config.PlacementConfig(), Devices(gpus=gpus, cores=2))


def demo(*overrides: str) -> config.TrainConfig:
    return config.load(DEMO, list(overrides))


def test_a_cpu_gets_what_it_computes_fast(cpu):
    settled = precision.settled(demo(), placed(on_gpu=False))
    assert settled.model.dtype == ("bfloat16" if cpu else "float32")
    assert settled.publish_dtype == settled.model.dtype
    assert msgspec.structs.replace(settled, model=demo().model) == demo()


def test_a_gpu_gets_bfloat16(cpu):
    assert precision.settled(demo(), placed(on_gpu=True)).model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("capabilities", "dtype", "said"),
    [
        ([(8, 0), (9, 0)], "bfloat16", ""),
        ([(8, 6), None], "bfloat16", ""),
        ([(7, 5)], "float16", " (GPU 0 cannot compute in bfloat16)"),
        ([(9, 0), (7, 5)], "float16", " (GPU 1 cannot compute in bfloat16)"),
        ([(7, 5), (7, 5)], "float16", " (GPU 0 and GPU 1 cannot compute in bfloat16)"),
    ],
)
def test_gpus_that_are_too_old_for_bfloat16_get_float16_in_both_halves(capabilities, dtype, said):
    placement = placed(on_gpu=True, capabilities=capabilities)
    settled = precision.settled(demo(), placement)
    assert settled.model.dtype == dtype
    assert precision.remark(settled, placement) == said
    chosen = demo("model.dtype=bfloat16")
    assert precision.settled(chosen, placement) == chosen
    assert ('set model.dtype = "auto"' in precision.remark(chosen, placement)) == bool(said)
    assert precision.remark(demo("model.dtype=float32"), placement) == ""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_chosen_stays_and_a_slow_choice_is_remarked_on(cpu, dtype):
    chosen = demo(f"model.dtype={dtype}")
    assert precision.settled(chosen, placed(on_gpu=False)) == chosen
    remark = precision.remark(chosen, placed(on_gpu=False))
    assert ("in software" in remark) == (dtype == "bfloat16" and not cpu)
    assert precision.remark(chosen, placed(on_gpu=True)) == ""


def test_a_base_that_only_the_trainer_quantizes_is_remarked_on(cpu):
    remark = precision.remark(demo("model.load_in_4bit=true"), placed(on_gpu=True))
    assert "4 bits in the trainer alone" in remark
    assert 'rollout.on_sync_mismatch = "warn"' in remark
    meant = demo("model.load_in_4bit=true", "rollout.on_sync_mismatch=warn")
    assert precision.remark(meant, placed(on_gpu=True)) == ""


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ([], "bfloat16"),
        (["model.dtype=float32"], "float32"),
        (["model.dtype=float16"], "float32"),
        (["server.dtype=float32"], "float32"),
        (["vllm.dtype=float32"], "float32"),
        (["sglang.dtype=float32"], "bfloat16"),
        (["server.backend=sglang", "sglang.dtype=float32"], "float32"),
        (['vllm.extra_args=["--lora-dtype", "float16"]'], "float32"),
        (["rollout.publish_dtype=float32"], "float32"),
        (["model.dtype=float32", "rollout.publish_dtype=bfloat16"], "bfloat16"),
    ],
)
def test_an_adapter_is_sent_in_what_its_engine_computes_in(settings, sent):
    assert precision.settled(demo(*settings), placed(on_gpu=True)).publish_dtype == sent


def test_a_machine_that_says_nothing_of_its_cpu_counts_as_without(tmp_path):
    assert not computes(tmp_path / "missing")
