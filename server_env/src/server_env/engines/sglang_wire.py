"""What SGLang is asked, and what is read of its answers. Names are SGLang's; what is not read is left out."""

from collections.abc import Sequence
from typing import Any

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """All parameters are given: what is left out SGLang may take from its own command line."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False


class Generate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """POST /generate. A group is a batch of single requests: each has a name of its own by which it can be aborted,
    and no version of SGLang loses count of an adapter's users over them, as some do with n > 1.
    """

    rid: list[str]
    input_ids: list[Sequence[int]]
    sampling_params: list[SamplingParams]
    lora_path: str | None = None
    """An adapter's name. Without one SGLang answers for the base model."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    return_sampling_mask: bool = False


class FinishReason(msgspec.Struct, frozen=True):
    """stop, length or abort."""

    type: str


class Meta(msgspec.Struct, frozen=True):
    """Logprobs come as (logprob, token, text); the prompt's first token has none."""

    finish_reason: FinishReason
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_sampling_logprobs: list[float] | None = None


class Generated(msgspec.Struct, frozen=True):
    """One completion."""

    output_ids: list[int]
    meta_info: Meta


class Loaded(msgspec.Struct, frozen=True):
    """Reply to POST /load_lora_adapter: names and paths."""

    loaded_adapters: dict[str, Any]


class Info(msgspec.Struct, frozen=True):
    """GET /server_info."""

    version: str


class Model(msgspec.Struct, frozen=True):
    """The base model, or an adapter, which has no length."""

    max_model_len: int | None = None


class Models(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[Model]


generated = msgspec.json.Decoder(list[Generated])
loaded = msgspec.json.Decoder(Loaded)
info = msgspec.json.Decoder(Info)
models = msgspec.json.Decoder(Models)
