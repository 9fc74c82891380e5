"""Completions for people and scripts: prompts as they are written, and what came back as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bridge.errors import ConfigError
from trainer_env.config import DataConfig
from trainer_env.data import Prompt, require_whole_characters
from trainer_env.sampling.sampler import Sampler

Version = Literal["latest", "base"] | int
"""An adapter version by its number, the newest, or the model without an adapter."""

Prompts = str | Sequence[Any]
"""One prompt: text or a list of messages. Or a list of such prompts."""


@dataclass(frozen=True)
class Completion:
    """One answer. prompt: what was asked, as it went to the chat template.

    token_ids and logprobs (natural, at the sampling temperature) have one entry a token. version: 0 is the base model.
    """

    text: str
    finish_reason: str
    version: int
    prompt: Prompt = field(repr=False)
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)

    def __str__(self) -> str:
        return self.text


def number_of(version: Version) -> int:
    """A version as the bridge counts it: -1 is the newest. Raises ConfigError."""
    if isinstance(version, int) and not isinstance(version, bool) and version >= 0:
        return version
    if version in ("latest", "base"):
        return -1 if version == "latest" else 0
    raise ConfigError(f"version: expected 'latest', 'base' or a number of at least 0, got {version!r}.")


def as_prompts(prompts: Prompts, data: DataConfig) -> list[Prompt]:
    """Each prompt as the run's data has them: text becomes a user's turn, and the system prompt goes before it.

    Raises ConfigError for what is neither text nor messages.
    """
    if isinstance(prompts, Mapping):
        raise ConfigError(f"Expected a prompt as text or as a list of messages, got one message: {prompts!r:.120}.")
    if isinstance(prompts, str) or _is_conversation(prompts):
        prompts = [prompts]
    return [_as_prompt(prompt, data) for prompt in prompts]


def is_single(prompts: Prompts) -> bool:
    """Whether that is one prompt rather than a list of them."""
    return isinstance(prompts, str) or _is_conversation(prompts)


def complete(
    sampler: Sampler, prompts: Sequence[Prompt], *, n: int, temperature: float, max_tokens: int, version: Version
) -> list[list[Completion]]:
    """N completions of each prompt. Raises ConfigError for a version that is none, and what the server answers."""
    groups = sampler.sample(prompts, n=n, temperature=temperature, max_tokens=max_tokens, version=number_of(version))
    return [
        [
            Completion(
                text=sampler.decode(sample),
                finish_reason=sample.finish_reason,
                version=sample.version,
                prompt=prompt,
                token_ids=sample.token_ids,
                logprobs=sample.logprobs,
            )
            for sample in group
        ]
        for prompt, group in zip(prompts, groups, strict=True)
    ]


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(message, dict) for message in prompt)


def _as_prompt(prompt: Any, data: DataConfig) -> Prompt:
    if isinstance(prompt, str) and not data.chat:
        require_whole_characters(prompt, "The prompt")
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not _is_conversation(prompt) or not all({"role", "content"} <= message.keys() for message in prompt):
        raise ConfigError(
            f"Expected a prompt as text or as a list of messages with a role and a content, got {prompt!r:.120}."
        )
    for message in prompt:
        require_whole_characters(str(message["content"]), "The prompt")
    if data.system_prompt and prompt[0]["role"] != "system":
        return [{"role": "system", "content": data.system_prompt}, *prompt]
    return list(prompt)
