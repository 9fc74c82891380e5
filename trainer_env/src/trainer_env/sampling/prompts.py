"""Prompts as token ids, and which of a run's leave room for a completion."""

from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import ConfigError
from trainer_env.config import DataConfig, TrainConfig
from trainer_env.data import Data, Example

Prompt = str | list[dict[str, Any]]
"""Text, or a conversation for the chat template."""


class Fitting(msgspec.Struct, frozen=True):
    """A run's examples whose prompts leave room for a completion, and how many others there were."""

    data: Data
    left_out: int = 0

    def remark(self, config: TrainConfig) -> str:
        """How many were left out, for people; empty: none."""
        if not self.left_out:
            return ""
        kept = len(self.data.train) + len(self.data.evaluation)
        return (
            f"{self.left_out} of {self.left_out + kept} examples are left out: their prompts have more than "
            f"{config.max_prompt_length} tokens (data.filter_overlong_prompts)"
        )


def encode(prompt: Prompt, tokenizer: Any, config: DataConfig) -> list[int]:
    """A prompt's token ids: through the chat template if it is a conversation. Raises ConfigError for an empty one."""
    ids: list[int] = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else _chat(prompt, tokenizer, config)
    if not ids:
        raise ConfigError("A prompt has no tokens.", remedy="Leave empty prompts out of the data.")
    return ids


def too_long(prompt: Prompt, tokens: int, *, completion: int, context: int, why: str = "") -> ConfigError:
    """The error for a prompt that leaves no room for a completion of so many tokens, with its beginning."""
    return ConfigError(
        f"A prompt of {tokens} tokens and a completion of up to {completion} do not fit the context of "
        f"{context} tokens. The prompt begins: {_excerpt(prompt)}",
        why=why,
        remedy="Set data.filter_overlong_prompts = true to leave such samples out, raise model.max_seq_length and the "
        "server's limit with it, or lower grpo.max_completion_length.",
    )


def fitting(config: TrainConfig, data: Data, tokenizer: Any) -> Fitting:
    """The examples whose prompts leave room for the longest completion.

    Raises ConfigError, quoting the first of the others, unless data.filter_overlong_prompts leaves them out, and when
    none is left to train on.
    """
    limit = config.max_prompt_length
    long: list[tuple[Prompt, int]] = []

    def within(examples: list[Example]) -> list[Example]:
        counted = [(example, len(encode(example.prompt, tokenizer, config.data))) for example in examples]
        long.extend((example.prompt, tokens) for example, tokens in counted if tokens > limit)
        return [example for example, tokens in counted if tokens <= limit]

    kept = Data(within(data.train), within(data.evaluation))
    if long and not (config.data.filter_overlong_prompts and kept.train):
        count, most = len(data.train) + len(data.evaluation), max(tokens for _, tokens in long)
        raise too_long(
            *long[0],
            completion=config.grpo.max_completion_length,
            context=limit + config.grpo.max_completion_length,
            why=f"{len(long)} of {count} prompts are too long; the longest has {most} tokens.",
        )
    return Fitting(kept, len(long))


def fitting_early(config: TrainConfig, data: Data, model: str) -> Fitting:
    """The same before anything is loaded. Where the model has no tokenizer.json nothing is looked at.

    model: what `models.resolve` returned.
    """
    folder = Path(model)
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        return Fitting(data)
    from trainer_env.models import tokenizing  # Late: only the trainer's environment has what it needs.

    tokenizer = tokenizing.light(model)
    return fitting(config, data, tokenizer) if tokenizer else Fitting(data)


def _chat(conversation: list[dict[str, Any]], tokenizer: Any, config: DataConfig) -> list[int]:
    if not tokenizer.chat_template:
        raise ConfigError(
            "The data holds conversations, and this model's tokenizer has no chat template.",
            remedy="Set data.chat = false to send plain text, or train an instruction-tuned model.",
        )
    prefilled = conversation[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        conversation,
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
        tokenize=True,
        return_dict=False,
        **config.chat_template_kwargs,
    )


def _excerpt(prompt: Prompt, length: int = 300) -> str:
    text = prompt if isinstance(prompt, str) else " | ".join(str(message.get("content", "")) for message in prompt)
    return repr(text if len(text) <= length else text[:length] + "…")
