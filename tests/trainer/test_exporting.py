"""What is exported computes what was trained: the adapter as PEFT reads it, and the whole model with it inside."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.errors import BridgeError, ConfigError
from trainer.running import tiny_config
from trainer_env import config
from trainer_env.exporting import export

IDS = torch.arange(7, 31).reshape(2, 12)


def write_run(folder, tiny, *overrides, **lora):
    """A run's folder whose adapter has random weights, large enough to change every answer."""
    settings = tiny_config(folder, *overrides)
    settings.run_dir.mkdir(parents=True)
    (settings.run_dir / "config.toml").write_text(config.to_toml(settings))
    torch.manual_seed(5)
    targets = list(settings.lora.target_modules)
    options = {"r": 8, "lora_alpha": 16, "target_modules": targets, "task_type": "CAUSAL_LM", **lora}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(settings.run_dir / "adapter")
    return settings.run_dir


def rebase(run, base):
    """As if the run had been made on another base."""
    text = (run / "config.toml").read_text()
    name = config.load(run / "config.toml").model.name
    (run / "config.toml").write_text(text.replace(f'"{name}"', f'"{base}"'))
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))


@pytest.fixture
def a_run(tiny, tmp_path):
    return partial(write_run, tmp_path, tiny)


@pytest.fixture(scope="module")
def merged(tiny, tmp_path_factory):
    """A run that is merged once, since that takes a process of its own: (its folder, what was exported)."""
    folder = tmp_path_factory.mktemp("merged")
    run = write_run(folder, tiny, "model.load_in_4bit=true")
    return run, export(run, folder / "out", what="merged")


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float()


def greedy(model):
    return model.eval().generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0)


def trained(tiny, adapter):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), str(adapter))


def test_the_merged_model_answers_as_base_and_adapter_do(merged, tiny):
    run, done = merged
    whole = AutoModelForCausalLM.from_pretrained(done.folder, dtype=torch.float32)
    wanted, base = trained(tiny, run / "adapter"), AutoModelForCausalLM.from_pretrained(tiny)

    difference = (logits(whole) - logits(wanted)).abs().mean()
    change = (logits(wanted) - logits(base)).abs().mean()
    assert change > 0.1
    assert difference < change / 20  # The weights are rounded to 16 bit, once.

    # Rounding is all there is: the trained weights rounded by hand give the very same model.
    rounded = trained(tiny, run / "adapter").merge_and_unload()
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    assert torch.equal(logits(whole), logits(rounded))
    assert torch.equal(greedy(whole), greedy(rounded))
    assert not torch.equal(greedy(whole), greedy(base))


def test_the_merged_folder_stands_alone(merged, tiny):
    done = merged[1]
    assert not list(done.folder.glob("adapter*"))
    (weights,) = done.folder.glob("*.safetensors")
    with safe_open(weights, "pt") as file:
        assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.bfloat16"}  # noqa: SIM118
    assert json.loads((done.folder / "config.json").read_text())["dtype"] == "bfloat16"
    generation = json.loads((done.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == json.loads(Path(tiny, "generation_config.json").read_text())["eos_token_id"]
    text = "What is 2+2?"
    assert AutoTokenizer.from_pretrained(done.folder)(text) == AutoTokenizer.from_pretrained(tiny)(text)
    assert f"--model {done.folder}" in done.commands["vllm"] or f"serve {done.folder}" in done.commands["vllm"]
    assert "merging a LoRA adapter" in (done.folder / "README.md").read_text()


def test_an_exported_adapter_is_the_trained_one_and_finds_its_base(a_run, tiny, tmp_path):
    run = a_run(use_rslora=True)
    done = export(run, tmp_path / "adapter")
    settings = json.loads((done.folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == tiny  # builtin:… means nothing to others.
    again = trained(settings["base_model_name_or_path"], done.folder)
    torch.testing.assert_close(logits(again), logits(trained(tiny, run / "adapter")), rtol=1e-5, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(done.folder)) == len(AutoTokenizer.from_pretrained(tiny))


def test_a_base_that_cannot_be_merged_into_is_refused_in_words(a_run, tiny, tmp_path, monkeypatch):
    run = a_run()
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    settings = json.loads(Path(tiny, "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(settings))
    rebase(run, quantized)
    with pytest.raises(ConfigError, match="is quantized") as refused:
        export(run, tmp_path / "out", what="merged")
    assert "--what adapter" in refused.value.remedy
    assert not (tmp_path / "out").exists()

    # An adapter of another model.
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(
        type(AutoModelForCausalLM.from_pretrained(tiny).config)(**{**settings, "hidden_size": 32, "head_dim": 16})
    ).save_pretrained(other)
    plain = json.loads((other / "config.json").read_text())
    plain.pop("quantization_config", None)
    (other / "config.json").write_text(json.dumps(plain))
    rebase(run, other)
    with pytest.raises(ConfigError, match="does not fit"):
        export(run, tmp_path / "out", what="merged")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))] == []


def test_a_merge_that_dies_says_so_and_leaves_nothing(a_run, tmp_path, monkeypatch):
    run = a_run()
    # The parent's own environment breaks the child: transformers is not the one that it expects.
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "peft.py").write_text("raise MemoryError('no more')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}:{Path(config.__file__).parents[2]}")
    with pytest.raises(BridgeError, match="failed with exit status 1") as failed:
        export(run, tmp_path / "out", what="merged")
    assert "no more" in failed.value.log_tail
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "out"))] == []


def test_a_hub_model_is_named_as_it_is(a_run, tmp_path, monkeypatch):
    run = a_run()
    rebase(run, "owner/model")
    done = export(run, tmp_path / "out")
    assert json.loads((done.folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/model"
    assert 'base_model: "owner/model"' in (done.folder / "README.md").read_text()
    assert "tokenizer is that of owner/model" in done.notes[0]
    with pytest.raises(ConfigError, match="owner/model"):
        export(run, tmp_path / "merged", what="merged")


def test_a_16_bit_merge_of_a_4_bit_run_says_what_it_is(merged):
    done = merged[1]
    assert "4 bit" in done.notes[0]
    assert done.notes[0] in (done.folder / "README.md").read_text()
