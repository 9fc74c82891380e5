import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load, load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from bridge.errors import Refused, StaleVersion, SyncMismatch
from bridge.protocol import AdapterLoaded
from trainer_env.publishing.packing import Packer, pack
from trainer_env.publishing.publisher import Publisher
from trainer_env.runs.checkpoints import save_adapter

TARGETS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.arange(3, 23).unsqueeze(0)


@pytest.fixture
def base(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny)


def adapted(base, config=None, *, trained=True):
    model = get_peft_model(base, config or LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM"))
    if trained:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.2)
    return model.eval()


class Server:
    """Remembers what it was asked."""

    def __init__(self, max_lora_rank=64):
        self.welcome: Any = SimpleNamespace(limits=SimpleNamespace(max_lora_rank=max_lora_rank))
        self.published = []

    def submit(self, request: Any, buffer: Any = None) -> Any:
        raise AssertionError("publishing waits")

    def ask(self, request: Any, buffer: Any = None) -> Any:
        self.published.append((request, bytes(buffer)))
        return AdapterLoaded(version=request.version, name="", nbytes=len(buffer), spool_s=0.25, load_s=0.5)


def logits_of_packed(packed, tiny, folder):
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(packed.payload)
    (folder / "adapter_config.json").write_text(json.dumps(packed.adapter_config))
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder).eval()(IDS).logits


def test_peft_computes_the_same_logits_from_the_bytes(base, tiny, tmp_path):
    model = adapted(base)
    with model.disable_adapter():
        without = model(IDS).logits
    expected = model(IDS).logits
    assert (expected - without).abs().max() > 0.1
    torch.testing.assert_close(logits_of_packed(pack(model), tiny, tmp_path / "a"), expected, rtol=0, atol=0)


def test_bytes_and_config_are_what_peft_saves(base, tmp_path):
    model = adapted(base)
    packed = pack(model)
    save_adapter(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    mine = load(bytes(packed.payload))
    assert mine.keys() == saved.keys()
    assert all(torch.equal(mine[name], saved[name]) for name in saved)
    written = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert sorted(written.pop("target_modules")) == sorted(TARGETS)
    ours = json.loads(json.dumps(packed.adapter_config))
    assert sorted(ours.pop("target_modules")) == sorted(TARGETS)
    assert ours == written


def test_the_same_weights_are_the_same_bytes(base):
    model = adapted(base)
    names = list(json.loads(bytes(pack(model).payload)[8:].split(b"}}", 1)[0] + b"}}"))
    assert names[1:] == sorted(names[1:])


def test_saving_replaces_an_older_adapter_and_leaves_nothing_aside(base, tmp_path):
    model = adapted(base, trained=False)
    save_adapter(model, tmp_path / "run" / "adapter")
    first = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.fill_(1.0)
    save_adapter(model, tmp_path / "run" / "adapter")
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes() != first
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["adapter"]


def test_only_the_trained_adapter_is_sent(base):
    model = adapted(base)
    alone = bytes(pack(model).payload)
    model.add_adapter("ref", model.peft_config["default"])
    assert bytes(pack(model).payload) == alone
    assert not any("ref" in name for name in load(alone))


def test_rank_stabilized_scaling_survives_engines_that_know_only_the_plain_one(base, tiny, tmp_path):
    model = adapted(base, LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, use_rslora=True, task_type="CAUSAL_LM"))
    packed = pack(model)
    assert packed.adapter_config["use_rslora"] is False
    torch.testing.assert_close(logits_of_packed(packed, tiny, tmp_path / "a"), model(IDS).logits)


def test_bfloat16_halves_the_bytes(base):
    model = adapted(base)
    full, half = load(bytes(pack(model).payload)), load(bytes(pack(model, dtype="bfloat16").payload))
    assert all(half[name].dtype == torch.bfloat16 for name in full)
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)


def test_what_was_packed_last_stays_while_the_next_one_is_packed(base):
    model = adapted(base)
    packer = Packer(model)
    first = packer.pack()
    before = bytes(first.payload)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1  # Another storage, as when a model is moved.
    second = packer.pack()
    assert bytes(first.payload) == before
    assert bytes(second.payload) == bytes(pack(model).payload) != before
    assert second.digest == pack(model).digest != first.digest


def test_any_number_of_tensors_costs_one_copy_to_the_host(base):
    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
            return func(*args, **(kwargs or {}))

    model = adapted(base)
    with Copies() as copies:
        pack(model)
    assert copies.count == 1


@pytest.mark.filterwarnings("ignore:.*lora_bias=True")  # PEFT advises against what is refused here.
@pytest.mark.parametrize(
    ("named", "config"),
    [
        ("modules_to_save", LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"])),
        ("use_dora", LoraConfig(r=4, target_modules=TARGETS, use_dora=True)),
        ("bias", LoraConfig(r=4, target_modules=TARGETS, bias="lora_only")),
        ("lora_bias", LoraConfig(r=4, target_modules=TARGETS, lora_bias=True)),
        ("rank_pattern", LoraConfig(r=4, target_modules=TARGETS, rank_pattern={"q_proj": 8})),
        ("alpha_pattern", LoraConfig(r=4, target_modules=TARGETS, alpha_pattern={"q_proj": 8})),
        ("trainable_token_indices", LoraConfig(r=4, target_modules=TARGETS, trainable_token_indices=[1, 2])),
        ("layer_replication", LoraConfig(r=4, target_modules=TARGETS, layer_replication=[[0, 2], [0, 2]])),
        ("init_lora_weights", LoraConfig(r=4, target_modules=TARGETS, init_lora_weights="olora")),
        ("rank 4 .* limit of 2", LoraConfig(r=4, target_modules=TARGETS)),
        ("IA3", IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_server_cannot_represent_is_refused_by_name_and_not_sent(base, named, config):
    server = Server(max_lora_rank=2)
    with pytest.raises(Refused, match=named):
        Publisher(server).publish(1, adapted(base, config, trained=False))
    assert server.published == []


def test_a_version_is_sent_once_and_versions_only_rise(base):
    model, server = adapted(base), Server()
    publisher = Publisher(server)
    first = publisher.publish(3, model)
    assert publisher.publish(3, model) is first
    assert [request.version for request, _ in server.published] == [3]
    publisher.publish(5, model)
    with pytest.raises(StaleVersion, match="version 4"):
        publisher.publish(4, model)


def test_version_0_is_the_base_model_and_is_not_sent(base):
    model, server = adapted(base, trained=False), Server()
    assert Publisher(server).publish(0, model).version == 0
    assert server.published == []


def test_a_trained_adapter_is_no_version_0(base):
    with pytest.raises(Refused, match="Version 0"):
        Publisher(Server()).publish(0, adapted(base))


@pytest.mark.parametrize(
    ("learning_rate", "grad_norm", "dtype", "wrong"),
    [
        (1e-3, 0.5, "float32", True),
        (0.0, 0.5, "float32", False),
        (1e-3, 0.0, "float32", False),
        (1e-3, 0.5, "bfloat16", True),
    ],
)
def test_the_same_weights_twice_are_wrong_only_after_a_step_that_moved(base, learning_rate, grad_norm, dtype, wrong):
    model = adapted(base)
    publisher = Publisher(Server(), dtype=dtype)
    publisher.publish(1, model)
    publisher.require_change(learning_rate=1.0, grad_norm=1.0)
    publisher.publish(2, model)
    if wrong:
        with pytest.raises(SyncMismatch, match="version 2 has the very weights"):
            publisher.require_change(learning_rate=learning_rate, grad_norm=grad_norm)
    else:
        publisher.require_change(learning_rate=learning_rate, grad_norm=grad_norm)


def test_a_step_too_small_for_bfloat16_has_moved_the_weights_all_the_same(base):
    model = adapted(base)
    publisher = Publisher(Server(), dtype="bfloat16")
    publisher.publish(1, model)
    sent = bytes(pack(model, dtype="bfloat16").payload)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(9.0))
    assert bytes(pack(model, dtype="bfloat16").payload) == sent
    publisher.publish(2, model)
    publisher.require_change(learning_rate=1e-6, grad_norm=1.0)


def test_another_version_in_the_answer_is_an_error(base):
    class Confused(Server):
        def ask(self, request, buffer=None):
            return AdapterLoaded(version=7, name="", nbytes=1, spool_s=0, load_s=0)

    with pytest.raises(SyncMismatch, match="loaded version 7"):
        Publisher(Confused()).publish(8, adapted(base))


def test_the_engine_time_is_part_of_the_whole(base):
    publisher = Publisher(Server())
    publisher.publish(1, adapted(base))
    assert publisher.last is not None
    assert publisher.last.load_ms == 500.0
    assert publisher.last.publish_ms > 0
