"""Turns the trained adapter into bytes that PEFT, vLLM and SGLang read, and makes the server serve them."""

import hashlib
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, Refused, StaleVersion, SyncMismatch
from bridge.protocol import AdapterLoaded, PublishAdapter
from trainer_env.server import Server

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
    """An adapter ready to send. payload: a safetensors file; adapter_config: PEFT's adapter_config.json."""

    payload: memoryview
    sha256: str
    adapter_config: dict[str, object]


@dataclass(frozen=True)
class Published:
    """What became of one publish. Times in milliseconds; load_ms is the engine's share of publish_ms.

    repeated: the bytes are those of the version before.
    """

    loaded: AdapterLoaded
    sha256: str
    publish_ms: float
    load_ms: float
    repeated: bool = False


class Publisher:
    """Sends one adapter a version, in rising order; a version that is asked for again is not sent again.

    Version 0 is the server's base model, and what an adapter that has not been trained yet computes: it is never sent.
    """

    def __init__(self, server: Server, *, timeout_s: float = 60.0, dtype: str = "float32") -> None:
        self.server = server
        self._timeout_s = timeout_s
        self._dtype = dtype
        self.last: Published | None = None

    def publish(self, version: int, model: Any) -> AdapterLoaded:
        """Make the server serve the model's adapter as `version`. Returns once new requests use it.

        model: a PeftModel, unwrapped. Raises Refused for an adapter that the server cannot represent, StaleVersion
        for a version older than the last, and whatever error the server answers with.
        """
        if self.last is not None and version <= self.last.loaded.version:
            if version == self.last.loaded.version:
                return self.last.loaded
            raise StaleVersion(
                f"Adapter version {version} was to be published after version {self.last.loaded.version}.",
                why="Versions are optimizer steps, and those only rise within a run.",
            )
        if version == 0:
            self.last = Published(_base_model(model), "", 0.0, 0.0)
            return self.last.loaded
        started = time.perf_counter()
        packed = pack(model, max_rank=self.server.welcome.limits.max_lora_rank, dtype=self._dtype)
        request = PublishAdapter(
            version=version,
            sha256=packed.sha256,
            adapter_config=packed.adapter_config,
            deadline_s=self._timeout_s,
        )
        try:
            loaded: AdapterLoaded = self.server.ask(request, packed.payload)
        except BridgeError as error:
            error.what = f"Adapter version {version} does not serve: {error.what}"
            error.log_path = error.log_path or self.server.welcome.log_path
            error.remedy = error.remedy or "That log says more. `--resume` goes on from the last checkpoint."
            raise
        if loaded.version != version:
            raise SyncMismatch(
                f"Adapter version {version} was published, and the server loaded version {loaded.version}."
            )
        self.last = Published(
            loaded,
            packed.sha256,
            publish_ms=(time.perf_counter() - started) * 1000,
            load_ms=loaded.load_s * 1000,
            repeated=self.last is not None and self.last.sha256 == packed.sha256,
        )
        return loaded

    def require_change(self, *, learning_rate: float, grad_norm: float) -> None:
        """Raise SyncMismatch when a step that must have moved the weights published the bytes of the version before.

        Adapters sent as bfloat16 may round to the same bytes, so these are not held to it.
        """
        if self.last and self.last.repeated and self._dtype == "float32" and learning_rate > 0 and grad_norm > 0:
            raise SyncMismatch(
                f"Adapter version {self.last.loaded.version} has the very bytes of the version before it, "
                f"after a step with learning rate {learning_rate:g} and gradient norm {grad_norm:g}.",
                why="The optimizer trains other weights than the ones that are published.",
                remedy="Report this with the versions of unsloth, trl and peft that scripts/doctor.py prints.",
            )


def pack(model: Any, *, max_rank: int = 0, dtype: str = "float32") -> Packed:
    """The model's trained adapter as one safetensors file in memory, under PEFT's names.

    All tensors are joined on their device and come to the host in one copy: hundreds of small ones cost far more on a
    GPU. max_rank: the server's limit, 0 for none. Raises Refused, naming what the server cannot represent.
    """
    import torch

    config: LoraConfig = model.peft_config[ADAPTER]
    _refuse_what_engines_drop(config, max_rank)
    torch_dtype: torch.dtype = getattr(torch, dtype)
    tensors = _tensors(model)
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * torch_dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    start = 8 + len(encoded)
    payload = bytearray(start + offset)
    payload[:start] = len(encoded).to_bytes(8, "little") + encoded
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()]).to(torch_dtype)
    torch.frombuffer(payload, dtype=torch_dtype, offset=start).copy_(flat)
    return Packed(memoryview(payload), hashlib.sha256(payload).hexdigest(), _adapter_config(config))


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


def _tensors(model: Any) -> "dict[str, torch.Tensor]":
    """The trained adapter's tensors by PEFT's names, in their order: the same weights are the same bytes."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    return dict(sorted(get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False).items()))


def _base_model(model: Any) -> AdapterLoaded:
    """The answer for version 0. Raises Refused when the adapter already differs from the base model."""
    if any(tensor.any() for name, tensor in _tensors(model).items() if ".lora_B." in name):
        raise Refused(
            "Version 0 is the base model, and this adapter already differs from it.",
            remedy="Leave lora.init_lora_weights at true, or go on from a checkpoint with --resume.",
        )
    return AdapterLoaded(version=0, name="", nbytes=0, spool_s=0.0, load_s=0.0)
