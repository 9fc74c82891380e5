"""A reward that failed, and the sample on which it did."""

from collections.abc import Sequence
from typing import Any

from bridge.errors import BridgeError
from trainer_env.rewards.completions import text_of


class RewardError(BridgeError, ValueError):
    """A reward function failed on a completion."""

    code = "reward"


def sample_at(row: int, prompts: Sequence[Any], completions: Sequence[Any]) -> str:
    """Which sample that is: its row, its prompt and its completion, each cut short."""
    return f"for row {row}.\n  prompt: {shown(asked(prompts[row]))}\n  completion: {shown(text_of(completions[row]))}"


def asked(prompt: Any) -> str:
    """A prompt on one line: a conversation's turns with a bar between them."""
    return prompt if isinstance(prompt, str) else " | ".join(text_of([message]) for message in prompt)


def shown(value: Any, limit: int = 400) -> str:
    """A value in at most `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
