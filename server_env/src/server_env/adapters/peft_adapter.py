"""Reads what an adapter is from its bytes, and refuses by name what the server cannot represent. No torch, no numpy."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bridge.errors import Refused
from bridge.hub_cache import model_folder

MAX_HEADER_BYTES = 64 << 20

_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>A|B)(?:\.default)?\.weight$")
_LAYER = re.compile(r"(?:^|\.)layers\.(?P<index>\d+)\.(?P<block>self_attn|mlp)\.(?P<name>\w+)$")

_NOTHING: tuple[object, ...] = (None, False, (), [], {}, "none", "")
_MUST_BE_NOTHING = (
    "modules_to_save",
    "use_dora",
    "bias",
    "lora_bias",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "target_parameters",
)
_DENSE = {"llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "olmo", "olmo2", "granite"}
"""Model types whose projections have the shapes that their config says, under these names."""


class Tensor(msgspec.Struct, frozen=True):
    """An entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What a model's config.json says; 0 and None where it does not. Shapes are (in, out).

    kv_values: numbers that the KV cache holds for one token. max_context: tokens that the model was made for.
    """

    vocab_size: int = 0
    layers: int = 0
    projections: Mapping[str, tuple[int, int]] | None = None
    kv_values: int = 0
    max_context: int = 0

    @property
    def flops(self) -> int:
        """Of reading one token of a prompt, about; 0 for a model whose shapes are not known."""
        return 2 * self.layers * sum(rows * columns for rows, columns in (self.projections or {}).values())

    @classmethod
    def read(cls, model: str) -> "BaseModel":
        """From a folder, or of a model on the hub from its cache; of a model that is not there nothing is known."""
        folder = model_folder(model)
        if not folder or not (folder / "config.json").is_file():
            return cls()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**config, **config.get("text_config", {})}
        vocab_size, layers = int(text.get("vocab_size") or 0), int(text.get("num_hidden_layers") or 0)
        projections = _projections(text) if config.get("model_type") in _DENSE else None
        kv_values = 2 * layers * projections["k_proj"][1] if projections else 0
        max_context = int(text.get("max_position_embeddings") or 0)
        return cls(vocab_size, layers, projections, kv_values, max_context)

    def adapter_bytes(self, rank: int) -> int:
        """Of the tensors of the largest adapter of that rank, in float32; 0 where the shapes are not known."""
        if not self.projections:
            return 0
        hidden, _ = self.projections["q_proj"]
        ends = 2 * (hidden + self.vocab_size)  # The embeddings, and what makes logits of the last hidden state.
        return 4 * rank * (self.layers * sum(map(sum, self.projections.values())) + ends)


def _projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]] | None:
    hidden, inner, heads = (config.get(k) for k in ("hidden_size", "intermediate_size", "num_attention_heads"))
    if not (isinstance(hidden, int) and isinstance(inner, int) and isinstance(heads, int)):
        return None
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    return {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }


def check(config: Mapping[str, Any], data: memoryview, *, max_rank: int, base: BaseModel) -> None:
    """Raise Refused, naming the part, unless this is a plain LoRA adapter of the base model within max_rank.

    config: PEFT's adapter_config.json. data: the safetensors file.
    """
    _check_config(config, max_rank)
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in read_header(data).items():
        found = _TENSOR.match(name)
        if not found or len(tensor.shape) != 2:
            raise Refused(
                f"The adapter has a tensor that the server cannot serve: {name}.",
                why="Only the A and B matrices of LoRA are served; the rest would be dropped silently.",
                remedy="Train without modules_to_save, DoRA, biases or new tokens.",
            )
        sides.setdefault(found["module"], {})[found["side"]] = tensor.shape
    if not sides:
        raise Refused("The adapter holds no tensors.", remedy="Check lora.target_modules.")
    for module, shapes in sides.items():
        _check_module(module, shapes, max_rank, base)


def _check_config(config: Mapping[str, Any], max_rank: int) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise Refused(f"The server serves LoRA adapters, not {config['peft_type']}.", remedy="Train with LoRA.")
    for name in _MUST_BE_NOTHING:
        if config.get(name) not in _NOTHING:
            raise Refused(
                f"The server cannot represent an adapter with {name} = {config[name]!r}.",
                why="Engines drop it silently, and would sample from another policy than the one that is trained.",
                remedy=f"Train without {name}.",
            )
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise Refused(f"The adapter's config has no rank: r = {config.get('r')!r}.")
    if max(ranks) > max_rank:
        raise _rank_too_high(max(ranks), max_rank)


def _rank_too_high(rank: int, max_rank: int) -> Refused:
    return Refused(
        f"The adapter's rank {rank} is above the server's limit of {max_rank}.",
        why="The engine was started with room for smaller adapters.",
        remedy=f"Set lora.r to {max_rank} or less, or start the server with server.max_lora_rank = {rank}.",
    )


def _check_module(module: str, shapes: Mapping[str, tuple[int, ...]], max_rank: int, base: BaseModel) -> None:
    if shapes.keys() != {"A", "B"}:
        raise Refused(f"The adapter has only one of the two matrices of {module}.")
    (rank, inputs), (outputs, rank_b) = shapes["A"], shapes["B"]
    if rank != rank_b:
        raise Refused(f"The adapter's matrices of {module} do not fit each other: ranks {rank} and {rank_b}.")
    if rank > max_rank:
        raise _rank_too_high(rank, max_rank)
    layer = _LAYER.search(module)
    if not layer:
        return
    expected = base.projections.get(layer["name"]) if base.projections else None
    if (base.layers and int(layer["index"]) >= base.layers) or (expected and expected != (inputs, outputs)):
        raise Refused(
            f"The adapter does not belong to the server's base model: {module} is {inputs} to {outputs}.",
            why=f"The base model has {base.layers} layers, and {expected} there.",
            remedy="Train the model that the server serves.",
        )


def read_header(data: memoryview) -> dict[str, Tensor]:
    """The tensors of a safetensors file, checked to lie inside it. Raises Refused when it is none."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(MAX_HEADER_BYTES, len(data) - 8):
        raise Refused("The adapter's bytes are no safetensors file.", remedy="Publish what PEFT saves.")
    try:
        entries = msgspec.json.decode(data[8 : 8 + size], type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {name: msgspec.json.decode(raw, type=Tensor) for name, raw in entries.items()}
    except msgspec.DecodeError as error:
        raise Refused(f"The adapter's safetensors header cannot be read: {error}.") from None
    room = len(data) - 8 - size
    for name, tensor in tensors.items():
        start, end = tensor.data_offsets
        if not 0 <= start <= end <= room:
            raise Refused(f"The adapter is cut off: tensor {name} reaches beyond its end.")
    return tensors
