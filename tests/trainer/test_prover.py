"""The proof of sync around the real trainer: each way to be out of sync is caught, by the check meant for it."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bridge.errors import SyncMismatch
from trainer.hf_server import HFServer
from trainer_env.proof import comparisons, probe
from trainer_env.proof.agreement import Figures
from trainer_env.proof.canary import CanaryWeights, borrowed
from trainer_env.proof.prover import Prover, SyncWarning

WARN = 'rollout.on_sync_mismatch="warn"'
CONSTANT = ("grpo.learning_rate=1e-3", 'grpo.lr_scheduler_type="constant"')


def summary_of(done):
    return [step.proof for step in done.steps]


def caught(train, server, *overrides):
    with pytest.raises(SyncMismatch) as error:
        train(*overrides, server=server)
    assert "on_sync_mismatch" in error.value.remedy
    return error.value


def zeroed(which):
    """Adapters with the effect of some tensors taken out."""
    return lambda tensors: {
        name: torch.zeros_like(tensor) if which(name) and "lora_B" in name else tensor
        for name, tensor in tensors.items()
    }


def other_base(tiny, folder):
    """The same model with a third of its numbers changed a little, as by another checkpoint."""
    shutil.copytree(tiny, folder)
    path = folder / "model.safetensors"
    torch.manual_seed(1)
    tensors = {name: tensor * (1 + 0.3 * torch.randn_like(tensor)) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return str(folder)


# ---- honest runs ---------------------------------------------------------------------------------------------------


def test_every_step_of_an_honest_run_agrees(train):
    done = train("grpo.max_steps=6", *CONSTANT)
    assert summary_of(done) == ["agrees"] * 6
    assert all(step.proof_ms > 0 for step in done.steps)


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_the_proof_is_made_at_temperature_1_whatever_is_sampled_at(train, temperature):
    done = train(f"grpo.temperature={temperature}", *CONSTANT, "grpo.max_steps=3")
    assert summary_of(done) == ["agrees"] * 3


@pytest.mark.parametrize(
    "setting", ["lora.use_rslora=true", "lora.lora_dropout=0.1", "grpo.beta=0.05", "grpo.num_iterations=2"]
)
def test_other_settings_agree_as_well(train, setting):
    done = train("grpo.max_steps=4", *CONSTANT, setting)
    assert summary_of(done) == ["agrees"] * 4


def test_a_resumed_run_has_the_same_probe_and_proves_the_version_that_it_goes_on_with(train, tiny):
    train("grpo.max_steps=2", *CONSTANT, "grpo.save_steps=1")
    done = train("grpo.max_steps=4", *CONSTANT, resume=True, server=HFServer(tiny))
    assert summary_of(done) == ["agrees"] * 4
    rows = json.loads((done.config.run_dir / probe.FILE).read_text())
    assert len(rows) == 2
    assert len({len(row) for row in rows}) == 1


def test_the_canary_gives_the_adapter_back_bit_for_bit(tiny):
    torch.manual_seed(3)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny), LoraConfig(r=4, target_modules=["q_proj", "up_proj"])
    )
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(5, 25).unsqueeze(0)

    def score():
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    base = score()
    with borrowed(model) as parameters:
        canary = CanaryWeights(parameters, 2.0)
        canary.resize(score)
        whole, without = score(), canary.without_each(score)
        assert score() == whole
        assert all(torch.equal(p, p.bfloat16().float()) for p in parameters.values())
        assert 0.4 < comparisons.rms(comparisons.less(whole, base)) < 2.5
        assert all(comparisons.rms(comparisons.less(whole, found)) > 0.1 for found in without.values())
    assert set(without) == {"q_proj", "up_proj"}
    assert score() == base
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


# ---- sabotage ------------------------------------------------------------------------------------------------------


def test_another_base_model_is_caught_before_the_first_step(train, tiny, tmp_path):
    error = caught(train, HFServer(other_base(tiny, tmp_path / "other")))
    assert "base model check of adapter version 0" in error.what


def test_an_engine_that_ignores_adapters_is_caught_before_the_first_step(train, tiny):
    error = caught(train, HFServer(tiny, tamper=zeroed(lambda name: True)))
    assert "canary check of adapter version 0" in error.what


@pytest.mark.parametrize("module", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_a_dropped_module_is_caught_by_name(train, tiny, module):
    error = caught(train, HFServer(tiny, tamper=zeroed(lambda name: f".{module}." in name)))
    assert "canary check" in error.what
    assert f"leaves {module} out" in error.why


def test_an_adapter_at_another_scale_is_caught(train, tiny):
    def doubled(tensors):
        return {name: tensor * 2 if "lora_B" in name else tensor for name, tensor in tensors.items()}

    assert "canary check" in caught(train, HFServer(tiny, tamper=doubled)).what


def test_a_stale_prefix_cache_is_caught(train, tiny):
    assert "cached prefix check of adapter version 0" in caught(train, HFServer(tiny, stale=True)).what


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_logprobs_from_before_the_temperature_are_caught_by_the_ratio(train, tiny, temperature):
    server = HFServer(tiny, tempered=False)
    error = caught(train, server, f"grpo.temperature={temperature}")
    assert "ratio check of adapter version 0" in error.what
    assert "sampling temperature" in error.why
    assert not server.adapters, "nothing was learned from them"


class SticksTo(HFServer):
    """Serves an early adapter under the name of every later one, from a version on."""

    def __init__(self, *args, first, **options):
        super().__init__(*args, **options)
        self._first = first

    def load(self, version):
        super().load(min(version, self._first))


def test_an_adapter_that_no_longer_changes_is_caught_by_the_shift_before_it_is_learned_from(train, tiny):
    server = SticksTo(tiny, first=1)
    error = caught(train, server, *CONSTANT, "grpo.max_steps=12")
    assert "shift check of adapter version" in error.what
    assert max(server.adapters) < 12


class ForgetsAdapters(HFServer):
    """Serves the base model from a version on."""

    def load(self, version):
        super().load(version)
        if version >= 3:
            for name, parameter in self._model.named_parameters():
                if "lora_B" in name:
                    parameter.data.zero_()


def test_an_engine_that_forgets_adapters_is_caught_by_the_shift(train, tiny):
    error = caught(train, ForgetsAdapters(tiny), *CONSTANT, "grpo.max_steps=12")
    assert "shift check of adapter version 3" in error.what
    assert "ignores the adapter" in error.why


def test_the_same_weights_twice_are_caught_when_they_should_have_moved(train, tiny, monkeypatch):
    from trainer_env.publishing.packing import Packer

    packed = []

    def frozen(packer):
        if len(packed) < 2:  # The canary, and version 1.
            packed.append(real(packer))
        return packed[-1]

    real = Packer.pack
    monkeypatch.setattr(Packer, "pack", frozen)
    with pytest.raises(SyncMismatch, match="very weights of the version before"):
        train(*CONSTANT, "grpo.max_steps=4")


# ---- what happens then ---------------------------------------------------------------------------------------------


def test_told_to_warn_a_run_goes_on_says_so_once_and_records_each_step(train, tiny):
    with pytest.warns(SyncWarning) as warned:
        done = train(WARN, *CONSTANT, "grpo.max_steps=4", server=HFServer(tiny, tamper=zeroed(lambda name: True)))
    texts = [str(warning.message) for warning in warned]
    assert sum("canary check" in text for text in texts) == 1
    assert sum("shift check" in text for text in texts) <= 1
    assert summary_of(done)[0] == "disagrees"
    assert done.outcome.finished


class OnceWrong(HFServer):
    """Scores version 2 wrongly, the first time it is asked."""

    wrong = 2

    def score(self, prompt, completion, temperature=1.0):
        found = super().score(prompt, completion, temperature)
        if self.version == 2 and self.wrong:
            self.wrong -= 1
            return [value - 1 for value in found]
        return found


def test_a_passing_fault_is_asked_about_once_more_and_is_no_alarm(train, tiny):
    done = train(*CONSTANT, "grpo.max_steps=4", server=OnceWrong(tiny))
    assert summary_of(done) == ["agrees"] * 4


class Replaced(HFServer):
    """Another server from version 2 on."""

    canaries = 0

    def _publish(self, request, payload):
        if request.version == 2:
            self.welcome = msgspec.structs.replace(self.welcome, server_uuid="another")
        return super()._publish(request, payload)

    def _answer_canary(self, request, payload):
        self.canaries += 1
        return super()._answer_canary(request, payload)


def test_a_server_in_place_of_a_dead_one_is_proven_anew(train, tiny):
    server = Replaced(tiny)
    done = train(*CONSTANT, "grpo.max_steps=4", server=server)
    assert server.canaries == 2
    assert summary_of(done) == ["agrees"] * 4


def test_only_an_on_policy_batch_must_have_a_ratio_of_1(tmp_path):
    nobody: Any = SimpleNamespace(welcome=SimpleNamespace(log_path="server.log"))
    prover = Prover(nobody, None, tmp_path)
    off = Figures(0.5, 0.7, 3, 0.01, 100)
    prover.before_step(off, 4)
    with pytest.raises(SyncMismatch, match="ratio check of adapter version 3"):
        prover.before_step(off, 3)


def test_the_probe_is_short_and_fits_a_small_context(tmp_path):
    sampled = [([1] * 40, [2] * 20), ([1] * 40, [3] * 9), ([4] * 60, [5] * 30), ([6], [7])]
    rows = probe.chosen(tmp_path, sampled, 512)
    assert rows == [[*[1] * 28, *[2] * 20], [*[4] * 18, *[5] * 30]]
    assert probe.chosen(tmp_path, [([9], [9])], 512) == rows
    assert [len(row) for row in probe.chosen(_fresh(tmp_path), sampled, 64)] == [24, 24]


def _fresh(folder: Path) -> Path:
    (folder / "fresh").mkdir()
    return folder / "fresh"
