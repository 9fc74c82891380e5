"""A policy whose every weight moves, without training: what there is to publish."""

from typing import Any


def make(folder: str, rank: int, device: str) -> Any:
    """The base model of a folder under a fresh adapter on all seven projections (a PeftModel, fp32 as in training)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from trainer_env.config import LoraConfig as Ours

    torch.manual_seed(rank)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    targets = list(Ours().target_modules)
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=targets))


def trained(model: Any) -> list[Any]:
    """Its adapter's tensors."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def step(model: Any) -> None:
    """Move every weight of the adapter a little, as an optimizer step would, and wait until the device has."""
    import torch

    with torch.no_grad():
        for tensor in trained(model):
            tensor.add_(torch.randn_like(tensor), alpha=1e-3)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
