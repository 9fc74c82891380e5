"""The trained adapter as bytes that PEFT, vLLM and SGLang read: one safetensors file in memory."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.digest import digest
from bridge.errors import Refused

if TYPE_CHECKING:
    # Imported late at run time: what a run sets for torch and patches in peft comes first (grpo.import_unsloth).
    import torch
    from peft import LoraConfig

ADAPTER = "default"
"""The trained adapter. With beta > 0 TRL adds a frozen one beside it, which is never sent."""

_SAFETENSORS_NAMES = {"float32": "F32", "bfloat16": "BF16"}

_PLAIN: dict[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, {}, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None, []),
    "use_bdlora": (None, False),
    "init_lora_weights": (True, False, "gaussian"),
}
"""What a LoraConfig field must be for both engines to compute what the trainer does: the rest they drop or refuse."""


@dataclass(frozen=True)
class Packed:
    """An adapter ready to send. payload: a safetensors file; adapter_config: PEFT's adapter_config.json.

    fingerprint: of the weights as they are trained, before any rounding: sum and norm. Other weights have another one.
    """

    payload: memoryview
    digest: str
    adapter_config: dict[str, object]
    fingerprint: tuple[float, float]


class Packer:
    """Packs the adapter of one model again and again.

    PEFT is asked once for the tensors and their names, which takes it 25 ms for a small model: training changes them
    where they are. They are joined on their device and come to the host in one copy, for hundreds of small ones cost
    far more on a GPU. max_rank: the server's limit, 0 for none. Raises Refused, naming what the server cannot
    represent.
    """

    def __init__(self, model: Any, *, max_rank: int = 0, dtype: str = "float32") -> None:
        import torch

        config: LoraConfig = model.peft_config[ADAPTER]
        _refuse_what_engines_drop(config, max_rank)
        self._config = _adapter_config(config)
        self._dtype: torch.dtype = getattr(torch, dtype)
        named = adapter_tensors(model)
        self._parameters = _parameters_behind(named, model)
        header, size = _header(named, self._dtype.itemsize, _SAFETENSORS_NAMES[dtype])
        pinned = any(tensor.is_cuda for tensor in named.values())
        # Two: the last version's bytes may have to be sent once more while the next one's are on their way.
        self._buffers = itertools.cycle([_Buffer(header, size, self._dtype, pinned=pinned) for _ in range(2)])

    def pack(self) -> "Packed":
        """The adapter as it is now. The payload is overwritten by the call after the next one."""
        import torch

        buffer = next(self._buffers)
        trained = torch.cat([tensor.detach().reshape(-1) for tensor in self._parameters])
        buffer.values.copy_(trained.to(self._dtype), non_blocking=True)
        figures = [trained.sum(dtype=torch.float64), torch.linalg.vector_norm(trained, dtype=torch.float64)]
        total, norm = torch.stack(figures).tolist()  # Waits for the copy too: both are on one stream.
        return Packed(buffer.payload, digest(buffer.payload), self._config, (total, norm))


def pack(model: Any, *, max_rank: int = 0, dtype: str = "float32") -> Packed:
    """The model's adapter, packed once; see `Packer`."""
    return Packer(model, max_rank=max_rank, dtype=dtype).pack()


def adapter_tensors(model: Any) -> "dict[str, torch.Tensor]":
    """The trained adapter's tensors by PEFT's names, in their order: the same weights are the same bytes."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    return dict(sorted(get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False).items()))


class _Buffer:
    """A safetensors file in main memory. values: the part behind the header, as one tensor."""

    def __init__(self, header: bytes, size: int, dtype: "torch.dtype", *, pinned: bool) -> None:
        import torch

        whole = torch.empty(len(header) + size, dtype=torch.uint8, pin_memory=pinned)
        self.payload = memoryview(whole.numpy())
        self.payload[: len(header)] = header
        self.values = whole[len(header) :].view(dtype)


def _header(named: "dict[str, torch.Tensor]", itemsize: int, dtype: str) -> tuple[bytes, int]:
    """The header of a file with these tensors, its length a multiple of 8, and the number of bytes that follow."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in named.items():
        end = offset + tensor.numel() * itemsize
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(entries, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, offset


def _parameters_behind(named: "dict[str, torch.Tensor]", model: Any) -> "list[torch.Tensor]":
    """The model's own parameters that these tensors show, which stay the same when their storage is replaced."""
    by_place = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    found = [by_place.get(tensor.data_ptr()) for tensor in named.values()]
    unknown = [name for name, parameter in zip(named, found, strict=True) if parameter is None]
    if unknown:
        raise Refused(
            f"{unknown[0]} is no parameter of the model that is trained.",
            why="This release of PEFT or Unsloth keeps its adapters in another way.",
            remedy="Install the pinned versions with scripts/setup_envs.sh.",
        )
    return [parameter for parameter in found if parameter is not None]


def _refuse_what_engines_drop(config: "LoraConfig", max_rank: int) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise Refused(f"The server can serve LoRA adapters, not {kind}.", remedy="Train with LoRA.")
    for name, allowed in _PLAIN.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise Refused(
                f"The server cannot represent an adapter with {name}={value!r}.",
                why="vLLM and SGLang would drop it silently or refuse to load it.",
                remedy=f"Leave lora.{name} at {allowed[0]!r}.",
            )
    if max_rank and config.r > max_rank:
        raise Refused(
            f"The adapter's rank {config.r} is above the server's limit of {max_rank}.",
            why="The engine was started with room for smaller adapters.",
            remedy=f"Set lora.r to {max_rank} or less, or start the server with max_lora_rank = {config.r}.",
        )


def _adapter_config(config: "LoraConfig") -> dict[str, object]:
    """PEFT's adapter_config.json. A rank-stabilized scaling is written as a plain one, the only one SGLang computes."""
    written = config.to_dict() | {"inference_mode": True}
    if config.use_rslora:
        written |= {"use_rslora": False, "lora_alpha": config.lora_alpha * math.sqrt(config.r)}
    return {
        key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for key, value in written.items()
    }
