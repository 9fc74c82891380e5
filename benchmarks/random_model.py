"""Make a model of a real model's shape with random weights, for speeds: its completions practically never end early.

    .venvs/trainer/bin/python benchmarks/random_model.py FOLDER --like qwen2-1.5b [--tokenizer FOLDER]

The weights are bfloat16 safetensors, the same for the same shape, seed and kind of device. The tokenizer is that of the
default job, its vocabulary filled up to the model's with words that no text is cut into, so that every sampled id means
something.
A completion of 256 tokens ends early about twice in a thousand.
"""

import argparse
import json
from pathlib import Path
from typing import Any

_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_SIZES = {
    "qwen2-tiny": (64, 128, 2, 2, 2, 49_280),
    "qwen2-0.5b": (896, 4864, 24, 14, 2, 151_936),
    "qwen2-1.5b": (1536, 8960, 28, 12, 2, 151_936),
    "qwen2-7b": (3584, 18944, 28, 28, 4, 152_064),
}
SHAPES = {
    name: dict(zip((*_NAMES, "vocab_size"), sizes, strict=True)) | {"tie_word_embeddings": name != "qwen2-7b"}
    for name, sizes in _SIZES.items()
}

CONTEXT = 32_768


def tokenizer(folder: Path | None) -> Any:
    """The default job's, or the one in a folder."""
    if folder is None:
        from trainer_env.models import conversion

        return conversion.tokenizer()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def fill_vocabulary(file: Path, size: int) -> None:
    """Add words that no merge makes, up to a size, to a tokenizer.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    taken = {*words.values(), *(token["id"] for token in content["added_tokens"])}
    words |= {f"<unused{number}>": number for number in range(size) if number not in taken}
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def make(folder: Path, like: str, words: Any, seed: int) -> int:
    """Write the model and its tokenizer; the number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        **SHAPES[like],
        max_position_embeddings=CONTEXT,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    fill_vocabulary(folder / "tokenizer.json", config.vocab_size)
    return model.num_parameters()


def main() -> None:
    """Make it, and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--like", choices=SHAPES, default="qwen2-1.5b", help="whose shape (%(default)s)")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of a model (default: the default job's)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (%(default)s)")
    options = parser.parse_args()
    if (options.folder / "config.json").exists():
        print(f"{options.folder} is there already")
        return
    parameters = make(options.folder, options.like, tokenizer(options.tokenizer), options.seed)
    print(f"{options.folder}: {parameters / 1e6:,.0f} million parameters, like {options.like}")


if __name__ == "__main__":
    main()
