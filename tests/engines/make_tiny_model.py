"""Write a tiny random Llama with a byte-level tokenizer, and one LoRA adapter for it: everything an engine test needs.

Run with a Python that has torch and transformers: `python make_tiny_model.py FOLDER`. Takes a few seconds. Nothing is
downloaded. The weights are seeded, so that every run makes the same model.
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
VOCAB_SIZE = 512


def main(folder: Path) -> None:
    """Write the model and its tokenizer into folder."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        tie_word_embeddings=False,
        # Wide enough that the next-token distribution is far from uniform.
        initializer_range=0.25,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet, *(f"<extra{i}>" for i in range(VOCAB_SIZE - len(SPECIAL) - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    (folder / "complete.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
