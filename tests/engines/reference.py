"""Logprobs as Hugging Face computes them, in float32: `python reference.py MODEL < questions.json`, answers on stdout.

An adapter is added to the weights by hand (W + alpha / r * B A), so that neither PEFT nor an engine is trusted.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM


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


def main() -> None:
    """Answer all questions of standard input."""
    answers, models = [], {}
    for question in json.load(sys.stdin):
        adapter = question["adapter"]
        if adapter not in models:
            models[adapter] = merged(sys.argv[1], adapter)
        ids = torch.tensor([question["ids"]])
        with torch.no_grad():
            logits = models[adapter](ids).logits[0, :-1] / question["temperature"]
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        answers.append(chosen.tolist())
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
