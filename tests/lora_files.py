"""Random LoRA adapters as safetensors bytes, without torch: what a trainer would publish."""

import json
import random
from array import array
from dataclasses import dataclass
from pathlib import Path

from bridge.digest import digest
from bridge.protocol import PublishAdapter

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Adapter:
    """An adapter as it crosses the bridge."""

    data: bytes
    config: dict[str, object]

    @property
    def digest(self) -> str:
        return digest(self.data)

    def publish(self, version: int, deadline_s: float = 60.0) -> PublishAdapter:
        return PublishAdapter(version=version, digest=self.digest, adapter_config=self.config, deadline_s=deadline_s)

    def write(self, folder: Path) -> Path:
        """In PEFT's format."""
        folder.mkdir(parents=True)
        (folder / "adapter_model.safetensors").write_bytes(self.data)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        return folder


def shapes(model: Path) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each projection of a Llama."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def make(
    model: Path, seed: int, *, rank: int = 4, scale: float = 0.2, targets: tuple[str, ...] = ALL, **config
) -> Adapter:
    """A seeded adapter for a Llama folder. config: changes to adapter_config.json."""
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    rng = random.Random(seed)
    tensors = {}
    for layer in range(layers):
        for name in targets:
            block = "self_attn" if name in ALL[:4] else "mlp"
            module = f"base_model.model.model.layers.{layer}.{block}.{name}"
            inputs, outputs = shapes(model)[name]
            tensors[f"{module}.lora_A.weight"] = (rank, inputs)
            tensors[f"{module}.lora_B.weight"] = (outputs, rank)
    return pack(
        {name: (shape, [rng.gauss(0, scale) for _ in range(shape[0] * shape[1])]) for name, shape in tensors.items()},
        rank,
        targets,
        **config,
    )


def pack(tensors, rank: int = 4, targets: tuple[str, ...] = ALL, **config) -> Adapter:
    """An adapter of the given tensors: name -> (shape, values)."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, (shape, values) in tensors.items():
        start = len(body)
        body += array("f", values).tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(body)]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        "inference_mode": True,
    }
    return Adapter(len(head).to_bytes(8, "little") + head + bytes(body), plain | config)
