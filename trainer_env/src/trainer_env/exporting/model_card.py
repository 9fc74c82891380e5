"""README.md of what was exported: where it came from, in plain words, and how to serve it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_env.arguments import version
from trainer_env.exporting.exported_from import Origin

_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def model_card(
    origin: Origin,
    *,
    base: str,
    what: str,
    rank: int,
    commands: Mapping[str, str],
    asked: Mapping[str, str],
    notes: Sequence[str] = (),
) -> str:
    """The page as Markdown, with the header that model hubs read. base: a folder or a hub name.

    commands, asked: by backend, how to serve it and the model to name in a request.
    """
    head = ["---", *([] if Path(base).is_dir() else [f"base_model: {json.dumps(base)}"])]
    head += ["library_name: " + ("peft" if what == "adapter" else "transformers"), "tags: [grpo, lora, tandem]", "---"]
    kind = f"A LoRA adapter of rank {rank} for" if what == "adapter" else "What comes of merging a LoRA adapter into"
    lines = [*head, "", f"# {origin.run}", "", f"{kind} `{base}`: {origin.describe()}."]
    lines += [f"Trained with GRPO by Tandem {version()}.", *(("", *notes) if notes else ())]
    for backend, command in commands.items():
        lines += ["", f"With {_NAMES[backend]}:", "", "```", command, "```", ""]
        lines += [f"It answers OpenAI's API for the model `{asked[backend]}`."]
    return "\n".join([*lines, ""])
