"""Adapters of some projections become adapters of whole stacks, and stay the same function."""

import contextlib
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import lora_files
from bridge.errors import Refused
from served import tiny_model
from server_env.adapters.peft_adapter import BaseModel, check, read_header
from server_env.engines import sglang_lora
from server_env.engines.sglang_lora import complete

STACKED = {"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "model")


def values(folder):
    """Bytes of each tensor of an adapter folder, by name."""
    data = (folder / "adapter_model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = read_header(memoryview(data))
    for tensor in header.values():
        first, last = tensor.data_offsets
        assert last - first == math.prod(tensor.shape) * 4
    return {name: data[start + t.data_offsets[0] : start + t.data_offsets[1]] for name, t in header.items()}


def projections(names):
    return {name.split(".")[-3] for name in names}


@pytest.mark.parametrize(
    "targets",
    [("q_proj",), ("k_proj",), ("q_proj", "v_proj"), ("up_proj",), ("gate_proj", "o_proj"), ("k_proj", "up_proj")],
)
def test_what_a_stack_lacks_is_added_as_zeros_and_the_rest_stays_to_the_bit(model, tmp_path, targets):
    adapter = lora_files.make(model, 1, targets=targets)
    folder = adapter.write(tmp_path / "adapter")
    before = values(folder)
    complete(folder, BaseModel.read(str(model)))
    after = values(folder)
    assert {name: after[name] for name in before} == before
    expected = set(targets).union(*(stack for stack in STACKED if stack & set(targets)))
    assert projections(after) == expected
    added = after.keys() - before.keys()
    assert not any(any(after[name]) for name in added if ".lora_B." in name)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == expected
    assert {key: config[key] for key in config if key != "target_modules"} == {
        key: value for key, value in adapter.config.items() if key != "target_modules"
    }
    data = (folder / "adapter_model.safetensors").read_bytes()
    check(config, memoryview(data), max_rank=4, base=BaseModel.read(str(model)))
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("targets", [lora_files.ALL, ("o_proj",), ("down_proj", "o_proj")])
def test_an_adapter_of_whole_stacks_is_not_touched(model, tmp_path, targets):
    folder = lora_files.make(model, 1, targets=targets).write(tmp_path / "adapter")
    before = [(path.name, path.stat().st_ino, path.read_bytes()) for path in sorted(folder.iterdir())]
    complete(folder, BaseModel())
    assert before == [(path.name, path.stat().st_ino, path.read_bytes()) for path in sorted(folder.iterdir())]


def test_twice_is_as_good_as_once(model, tmp_path):
    folder = lora_files.make(model, 1, targets=("v_proj",)).write(tmp_path / "adapter")
    complete(folder, BaseModel.read(str(model)))
    once = values(folder)
    complete(folder, BaseModel.read(str(model)))
    assert values(folder) == once


def test_engines_that_complete_one_folder_at_once_do_it_once(model, tmp_path, monkeypatch):
    engines, added, both_add = 2, [], threading.Barrier(2)
    with_zeros = sglang_lora._with_zeros

    def add(*parts):
        added.append(parts)
        with contextlib.suppress(threading.BrokenBarrierError):  # Alone, as it should be.
            both_add.wait(0.5)
        return with_zeros(*parts)

    monkeypatch.setattr(sglang_lora, "_with_zeros", add)
    folder = lora_files.make(model, 1, targets=("q_proj", "v_proj")).write(tmp_path / "adapter")
    with ThreadPoolExecutor(engines) as pool:
        for done in [pool.submit(complete, folder, BaseModel.read(str(model))) for _ in range(engines)]:
            done.result()
    assert len(added) == 1
    assert projections(values(folder)) == {"q_proj", "k_proj", "v_proj"}


def test_a_pattern_of_targets_is_kept(model, tmp_path):
    folder = lora_files.make(model, 1, targets=("q_proj",), target_modules=r".*\.q_proj").write(tmp_path / "adapter")
    complete(folder, BaseModel.read(str(model)))
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == r".*\.q_proj"


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(Refused, match="no adapter"):
        complete(tmp_path, BaseModel())
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(Refused, match="no adapter"):
        complete(tmp_path, BaseModel())


def test_without_the_models_shapes_it_is_refused_with_what_to_add(model, tmp_path):
    folder = lora_files.make(model, 1, targets=("q_proj",)).write(tmp_path / "adapter")
    with pytest.raises(Refused) as caught:
        complete(folder, BaseModel())
    assert caught.value.remedy == "Add k_proj to lora.target_modules."


def test_an_adapter_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refused, match="no adapter"):
        complete(tmp_path, BaseModel())
