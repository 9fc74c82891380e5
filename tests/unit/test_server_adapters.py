"""What an adapter's bytes say, which ones are refused and why, and how they lie on disk."""

import asyncio
import json
import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lora_files
from bridge import protocol as p
from bridge.digest import digest
from bridge.errors import Refused
from served import tiny_model
from server_env.adapters.canary import CanaryCheck
from server_env.adapters.peft_adapter import BaseModel, check, read_header
from server_env.adapters.spool import Spool
from server_env.adapters.versions import AdapterLimits, Adapters
from server_env.gpus.sleeping import Sleeper


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "model")


def checked(adapter, model, max_rank=8):
    check(adapter.config, memoryview(adapter.data), max_rank=max_rank, base=BaseModel.read(str(model)))


def test_a_plain_adapter_passes(model):
    checked(lora_files.make(model, 1, rank=8), model)
    checked(lora_files.make(model, 1, targets=("q_proj", "down_proj")), model)


@pytest.mark.parametrize("rank", [1, 8])
def test_the_largest_adapter_of_a_rank_is_known_and_little_larger_than_one_of_all_projections(model, rank):
    header = 8 + int.from_bytes(lora_files.make(model, 1, rank=rank).data[:8], "little")
    tensors = len(lora_files.make(model, 1, rank=rank).data) - header
    assert tensors < BaseModel.read(str(model)).adapter_bytes(rank) <= tensors + 4 * rank * 2 * (64 + 512)
    assert BaseModel().adapter_bytes(rank) == 0


def test_nothing_is_held_against_an_adapter_of_an_unknown_model(model):
    checked(lora_files.make(model, 1), "some/hub-name")


def edited(model, change):
    """An adapter whose tensors went through change(name, shape) -> (name, shape), values filled in."""
    header = read_header(memoryview(lora_files.make(model, 1).data))
    tensors = {}
    for name, tensor in header.items():
        new_name, shape = change(name, tensor.shape)
        size = 1
        for n in shape:
            size *= n
        tensors[new_name] = (shape, [0.5] * size)
    return lora_files.pack(tensors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda n, s: (n.replace("layers.1", "layers.7"), s), "does not belong to the server's base model"),
        (lambda n, s: (n, (s[0], 65) if "q_proj.lora_A" in n else s), "q_proj is 65 to 64"),
        (lambda n, s: (n, (96, s[1]) if "down_proj.lora_B" in n else s), "down_proj is 128 to 96"),
        (lambda n, s: (n, (9, s[1]) if "k_proj.lora_A" in n else s), "do not fit each other"),
        (lambda n, s: (n.replace("v_proj.lora_B", "v_proj.lora_C"), s), "lora_C"),
        (lambda n, s: (n.replace("lora_A.weight", "lora_magnitude_vector"), s), "lora_magnitude_vector"),
        (
            lambda n, s: ("base_model.model.lm_head.weight" if "0.self_attn.q_proj.lora_A" in n else n, s),
            "lm_head.weight",
        ),
        (lambda n, s: (n.replace("lora_B", "lora_A") if "0.mlp.up_proj" in n else n, s), "only one of the two"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused_by_name(model, change, named):
    adapter = edited(model, change)
    with pytest.raises(Refused) as caught:
        checked(adapter, model)
    assert named in str(caught.value)


def test_the_rank_of_the_tensors_counts_and_not_only_that_of_the_config(model):
    adapter = lora_files.make(model, 1, rank=16, r=4)
    with pytest.raises(Refused, match="rank 16 is above the server's limit of 8"):
        checked(adapter, model)


@pytest.mark.parametrize("config", [{"r": 0}, {"r": None}, {"r": "8"}])
def test_a_config_without_a_rank_is_refused(model, config):
    with pytest.raises(Refused, match="no rank"):
        checked(lora_files.make(model, 1, **config), model)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"{{{",
        struct.pack("<Q", 9) + b'{"a":"b"}',
    ],
)
def test_bytes_that_are_no_safetensors_file_are_refused(data):
    with pytest.raises(Refused):
        read_header(memoryview(data))


def test_every_cut_of_an_adapter_is_refused(model):
    data = lora_files.make(model, 1, rank=1, targets=("q_proj",)).data
    for length in range(0, len(data), 37):
        with pytest.raises(Refused):
            read_header(memoryview(data[:length]))


def test_a_version_appears_whole_in_pefts_format(tmp_path, model):
    adapter = lora_files.make(model, 1)
    spool = Spool(tmp_path / "spool")
    path = spool.write("policy-v000001", memoryview(adapter.data), adapter.digest, adapter.config)
    assert path.name == "policy-v000001"
    assert (path / "adapter_model.safetensors").read_bytes() == adapter.data
    assert json.loads((path / "adapter_config.json").read_text()) == adapter.config
    assert spool.folder.stat().st_mode & 0o777 == 0o700
    spool.delete(path)
    assert not list(spool.folder.iterdir())


def test_other_bytes_than_announced_are_refused_and_leave_nothing(tmp_path):
    spool = Spool(tmp_path / "spool")
    with pytest.raises(Refused, match="digest"):
        spool.write("v", memoryview(b"abc"), digest(b"abd"), {})
    assert not list(spool.folder.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_refusal_and_leaves_nothing(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "spool")
    first = spool.write("policy-v000001", memoryview(b"a"), digest(b"a"), {})

    def full(path, data):
        with Path("/dev/full").open("wb", buffering=0) as file:
            file.write(data)

    monkeypatch.setattr("server_env.adapters.spool._write", full)
    with pytest.raises(Refused) as caught:
        spool.write("policy-v000002", memoryview(b"b"), digest(b"b"), {})
    assert "no room for 1 bytes" in caught.value.what
    assert "spool_dir" in caught.value.remedy
    assert list(spool.folder.iterdir()) == [first]


@pytest.mark.parametrize("what", ["publish", "canary"])
async def test_what_is_written_for_somebody_who_gives_up_meanwhile_is_removed(tmp_path, model, monkeypatch, what):
    adapter = lora_files.make(model, 1)
    begun, may_end, write = threading.Event(), threading.Event(), Spool.write

    def slow(*arguments):
        begun.set()
        may_end.wait(60)
        return write(*arguments)

    monkeypatch.setattr(Spool, "write", slow)
    replicas: Any = SimpleNamespace()
    spool = Spool(tmp_path / "spool")
    adapters = Adapters(replicas, spool, BaseModel.read(str(model)), AdapterLimits(8, 2, 4))
    said: dict[str, Any] = {"digest": adapter.digest, "adapter_config": adapter.config}
    if what == "publish":
        asked = adapters.publish(p.PublishAdapter(version=1, **said), memoryview(adapter.data))
    else:
        request = p.Canary(rows=(p.pack_ids([1, 2, 3]),), **said)
        check = CanaryCheck(adapters, 60.0, lambda *_: None)
        asked = check.answer(request, memoryview(adapter.data), Sleeper(replicas))
    asking = asyncio.create_task(asked)
    await asyncio.to_thread(begun.wait, 60)
    asking.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.get_running_loop().shutdown_default_executor()  # Whoever writes on has done so.
    assert not list(spool.folder.iterdir())
