"""A saved adapter is the bytes that training published, so that a server which has them knows them again."""

import pytest
import torch
from safetensors.torch import load

from bridge.digest import digest
from trainer_env.publishing import saved_adapter
from trainer_env.publishing.packing import pack
from trainer_env.runs.checkpoints import save_adapter
from trainer_env.training import grpo


@pytest.fixture
def policy(make_config, tiny):
    policy = grpo.load_policy(make_config(), tiny)
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return policy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_saved_is_what_was_published(policy, tmp_path, dtype):
    save_adapter(policy.model, tmp_path / "adapter")
    saved = saved_adapter.packed((tmp_path / "adapter" / saved_adapter.FILE).read_bytes(), dtype)
    published = pack(policy.model, dtype=dtype)
    ours, theirs = load(saved), load(bytes(published.payload))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert digest(saved) == published.digest
