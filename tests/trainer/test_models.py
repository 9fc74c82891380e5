import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.errors import ConfigError
from trainer_env import models
from trainer_env.models import conversion

RESOLVE = "import sys; from trainer_env import models; print(models.resolve(sys.argv[1]))"


def test_two_processes_at_once_make_one_model_and_a_third_finds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    command = [sys.executable, "-c", RESOLVE, "builtin:tiny-random-llama"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {child.communicate()[0].strip() for child in both}
    assert [child.returncode for child in both] == [0, 0]
    assert len(found) == 1

    (folder,) = found
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "models" / folder).iterdir()}
    assert models.resolve("builtin:tiny-random-llama") == folder
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "models" / folder).iterdir()}
    visible = [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"]
    assert [str(path) for path in visible] == [folder]


def test_a_conversion_that_fails_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_recipe", lambda name: "x" * 300)  # No file system takes so long a name.
    (tmp_path / "models").mkdir()
    with pytest.raises((ConfigError, OSError)):
        models.resolve("builtin:tiny-random-llama")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_interrupted_write_is_not_taken_for_a_model(tmp_path, monkeypatch):
    def cut_short(self, folder):
        (folder / "config.json").write_text("{}")
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", cut_short)
    monkeypatch.setattr(sys, "argv", ["conversion", "tiny-random-llama", str(tmp_path / "made")])
    with pytest.raises(OSError, match="No space"):
        conversion.main()
    assert list(tmp_path.iterdir()) == []


def test_resolving_a_model_leaves_torch_out_of_this_process():
    code = f"{RESOLVE}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code, "builtin:tiny-random-llama"], check=False).returncode == 0


def test_smollm2_ends_its_turns(tmp_path):
    folder = models.resolve("builtin:smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 2, 2)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()

    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].size(1) :]
    assert "Paris" in tokenizer.decode(answer)
    assert int(answer[-1]) == 2


def test_the_tiny_model_is_the_same_each_time_and_scales():
    one, again, eight = (conversion.tiny_random_llama(512, 2, scale).state_dict() for scale in (1.0, 1.0, 8.0))
    assert all(torch.equal(one[name], again[name]) for name in one)
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(eight[name], 8 * one[name])


def test_scaled_weights_change_the_outputs(tiny):
    assert tiny != models.resolve("builtin:tiny-random-llama")
    ids = torch.arange(20).unsqueeze(0)
    logits = AutoModelForCausalLM.from_pretrained(tiny)(ids).logits
    assert logits.std() > 0.5
    assert json.loads(Path(tiny, "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("builtin:smolm2-135m-instruct", "builtin:smollm2-135m-instruct"),
        ("builtin:gpt", "builtin:tiny-random-llama"),
        ("builtin:tiny-random-llama?scale=0", "scale=NUMBER"),
        ("builtin:tiny-random-llama?scale=big", "scale=NUMBER"),
        ("builtin:tiny-random-llama?size=2", "scale=NUMBER"),
        ("builtin:smollm2-135m-instruct?scale=2", "scale=NUMBER"),
        ("/no/such/folder", "Check the path"),
        ("./no-such-folder", "Check the path"),
        ("nobody/no-such-model", "Check the name"),
        ("no such model", "Check the name"),
    ],
)
def test_a_model_that_does_not_exist_is_refused_with_a_remedy(name, remedy):
    with pytest.raises(ConfigError) as refused:
        models.resolve(name)
    assert remedy in refused.value.remedy


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        models.resolve(str(tmp_path))


@pytest.mark.parametrize("where", ["folder", "hub"])
@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, True),
        ({"load_in_4bit": True}, True),
        ({"quant_method": "fp8"}, False),
        (None, False),
    ],
)
def test_weights_that_bitsandbytes_has_quantized_are_refused_before_an_engine_starts(
    tmp_path, monkeypatch, where, settings, refused
):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    monkeypatch.setattr(models, "go_offline_unless_reachable", lambda: "")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_: str(config))
    name = str(tmp_path) if where == "folder" else "owner/model-bnb-4bit"
    if not refused:
        assert models.resolve(name) == name
        return
    with pytest.raises(ConfigError, match="quantized with bitsandbytes") as error:
        models.resolve(name)
    assert "16-bit model" in error.value.remedy
    assert "model.load_in_4bit = true" in error.value.remedy


def test_a_local_folder_is_itself(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").symlink_to(tiny)
    assert models.resolve("./mine") == models.resolve("mine") == tiny
