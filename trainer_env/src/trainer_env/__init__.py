"""The trainer half: GRPO with LoRA through Unsloth and TRL. `Session` is the door to it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer_env.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    """Session, imported when it is asked for: the command line's help is quicker without it."""
    if name != "Session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainer_env.session import Session

    return Session
