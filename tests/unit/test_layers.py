"""The layers that are to get an adapter are those of the model, as far as its stored weights tell."""

import json
from pathlib import Path

import pytest

from bridge.errors import ConfigError
from trainer_env import config
from trainer_env.config import LoraConfig
from trainer_env.models.layers import require_layers, require_stored_layers, stored_layers
from trainer_env.placement import Placement
from trainer_env.serving import Serving
from trainer_env.session import Session

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.toml"
LLAMA = [f"model.layers.{index}.self_attn.{name}" for index in range(2) for name in ("q_proj", "k_proj", "o_proj")]
MANY = "model.safetensors.index.json"


def refusal(targets: list[str], layers: list[str]) -> str:
    with pytest.raises(ConfigError) as refused:
        require_layers(LoraConfig(target_modules=tuple(targets)), layers, "a/model")
    return str(refused.value)


@pytest.mark.parametrize("targets", [["q_proj"], ["self_attn.k_proj", "o_proj"], ["layers.1.self_attn.q_proj"]])
def test_a_target_is_the_end_of_a_layers_name(targets):
    require_layers(LoraConfig(target_modules=tuple(targets)), LLAMA, "a/model")


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "qproj"], "a/model has no layer 'qproj'"),
        (["c_attn"], "has no layer 'c_attn'"),
        (["proj"], "has no layer 'proj'"),
        (["mlp.q_proj"], "has no layer 'mlp.q_proj'"),
    ],
)
def test_a_target_that_fits_no_layer_is_refused(targets, expected):
    assert expected in refusal(targets, LLAMA)


def test_the_nearest_layer_is_named():
    assert "Did you mean 'q_proj'?" in refusal(["q_prj"], LLAMA)


def test_of_the_default_targets_a_model_has_to_have_one():
    require_layers(LoraConfig(), LLAMA, "a/model")
    assert "has no layer 'q_proj'" in refusal(list(LoraConfig().target_modules), ["h.0.attn.c_attn"])


def test_nothing_is_said_of_what_is_not_known():
    """The experts of a layer may be loaded as one tensor, to which Unsloth has an adapter of its own."""
    require_layers(LoraConfig(target_modules=("foo",)), [], "a/model")
    require_layers(LoraConfig(target_modules=("q_proj", "gate_up_proj")), [*LLAMA, "model.layers.0.mlp.experts"], "m")


def whole(names: list[str]) -> bytes:
    header = json.dumps({"__metadata__": {"format": "pt"}} | {name: {"dtype": "F32"} for name in names}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": whole(["a.q_proj.weight", "a.q_proj.bias", "norm.weight"])}, ["a.q_proj", "norm"]),
        ({MANY: json.dumps({"weight_map": {"m.0.up_proj.weight": "model-1.safetensors"}}).encode()}, ["m.0.up_proj"]),
        ({MANY: b"{"}, []),
        ({"model.safetensors": b"\xff" * 20}, []),
        ({"model.safetensors": b""}, []),
        ({"pytorch_model.bin": b"x"}, []),
    ],
)
def test_the_stored_weights_tell_the_layers(tmp_path: Path, files, expected):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert stored_layers(str(tmp_path)) == expected
    assert stored_layers(str(tmp_path / "none")) == []


def test_before_a_model_is_loaded_the_last_part_of_a_name_is_looked_for(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(whole([f"{layer}.weight" for layer in LLAMA]))
    require_stored_layers(LoraConfig(target_modules=("base.layers.0.self_attn.q_proj",)), str(tmp_path), "a/model")
    require_stored_layers(LoraConfig(), str(tmp_path), "a/model")
    with pytest.raises(ConfigError, match="has no layer 'foo'"):
        require_stored_layers(LoraConfig(target_modules=("q_proj", "foo")), str(tmp_path), "a/model")


def test_a_check_of_a_run_says_so_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model.safetensors").write_bytes(whole([f"{layer}.weight" for layer in LLAMA]))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(Serving, "check", lambda *_: "engine")
    settings = config.load(SMOKE, [f'model.name="{tmp_path}"', "lora.target_modules=['q_proj','foo']"])
    with pytest.raises(ConfigError, match="has no layer 'foo'"):
        Session(settings, Placement(mode="cpu")).check()
