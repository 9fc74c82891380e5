"""Merge an adapter into its base model: `python -m trainer_env.exporting.merging BASE ADAPTER FOLDER --parent PID`.

A process of its own, so that the memory goes back. What went wrong is the last line that it prints, as JSON of a
`bridge.errors.Failure`.
"""

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec

from bridge import guard
from bridge.errors import BridgeError, ConfigError, to_failure

ROOM = 1.2
"""Memory that merging in float32 takes, as a multiple of the weights in that type."""
_TIED = {"lm_head", "embed_tokens"}


def merge(base: str, adapter: Path, folder: Path, *, dtype: str, trust_remote_code: bool) -> None:
    """Write the base model with the adapter in its weights as safetensors of dtype. Raises BridgeError.

    It is added in float32 and rounded once; in dtype where memory is short.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The base model {base} cannot be loaded.",
            why=str(error).strip().splitlines()[0],
            remedy="Is it where it was when the run was made, or in the cache of the hub?",
        ) from error
    refuse_quantized(base, getattr(settings, "quantization_config", None))
    target = getattr(torch, dtype)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        base, dtype="auto", trust_remote_code=trust_remote_code, low_cpu_mem_usage=True
    )
    loaded = loaded.to(_working_type(loaded, target))
    try:
        whole: Any = PeftModel.from_pretrained(loaded, str(adapter))
    except (RuntimeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The adapter in {adapter} does not fit {base}.",
            why=str(error).strip().splitlines()[0],
            remedy="It was trained on another model, or its file was cut short.",
        ) from error
    if settings.tie_word_embeddings and _TIED & set(whole.peft_config["default"].target_modules or ()):
        raise ConfigError(
            "The adapter changes the input or output embeddings, and this model has one matrix for both.",
            why="Merged into it, the change would be made twice.",
            remedy="Export the adapter instead: --what adapter.",
        )
    merged: Any = whole.merge_and_unload(safe_merge=True)
    merged.to(target).save_pretrained(folder)


def refuse_quantized(base: str, quantization: object) -> None:
    """Raise ConfigError for a base whose weights are quantized already."""
    if quantization:
        raise ConfigError(
            f"{base} is quantized, and an adapter cannot be merged into such weights.",
            why="What training added is finer than the steps between the values they can take.",
            remedy="Export the adapter instead, --what adapter, and serve it over that base.",
        )


def _working_type(model: Any, target: Any) -> Any:
    """float32 where the weights fit into memory as that, besides as they are."""
    import psutil
    import torch

    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return torch.float32 if size * ROOM < psutil.virtual_memory().available else target


def main() -> int:
    """The exit status: 0; 1 when it failed, and standard output says why."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base")
    parser.add_argument("adapter", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="ends when the process of this pid does")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--trust-remote-code", action="store_true")
    options = parser.parse_args()
    guard.end_with_parent(options.parent, signal.SIGTERM)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # A run may hold the GPU, and there is more memory here.
    try:
        merge(
            options.base,
            options.adapter,
            options.folder,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
    except BridgeError as error:
        print(f"\n{msgspec.json.encode(to_failure(error)).decode()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
