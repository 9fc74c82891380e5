"""Logprobs as Hugging Face computes them, in float32: `python reference.py MODEL`, a JSON line in, a JSON line out.

An adapter's folder is read once: another adapter needs another folder.

An adapter is added to the weights by hand (W + alpha / r * B A), so that neither PEFT nor an engine is trusted.
"""

import functools
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM


@functools.lru_cache(2)
def merged(folder: str, adapter: str) -> LlamaForCausalLM:
    """The model, with an adapter's matrices added to its weights."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        config = json.loads((Path(adapter) / "adapter_config.json").read_text())
        tensors = load_file(Path(adapter) / "adapter_model.safetensors")
        weights = dict(model.named_parameters())
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            weights[f"{module}.weight"].data += config["lora_alpha"] / config["r"] * (b @ a)
    return model.eval()


def answer(folder: str, question: dict) -> list[float]:
    """Logprobs of all ids but the first."""
    ids = torch.tensor([question["ids"]])
    with torch.no_grad():
        logits = (
            merged(question.get("model", folder), question["adapter"])(ids).logits[0, :-1] / question["temperature"]
        )
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()


def main() -> None:
    """Answer until standard input closes."""
    for line in sys.stdin:
        print(json.dumps([answer(sys.argv[1], question) for question in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()
