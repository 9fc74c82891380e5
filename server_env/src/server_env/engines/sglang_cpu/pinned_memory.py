"""Page-locked memory where no accelerator could read from it: asked for, and left out.

SGLang's LoRA code pins its small host tensors without a condition, and torch refuses to pin when it has no accelerator.

Remove when SGLang pins only where `is_pin_memory_available()` says so (its issue 31894).
"""

import functools
from collections.abc import Callable
from typing import Any

FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


def ignore() -> None:
    """Have torch take requests for pinned memory and give ordinary memory, unless it has an accelerator."""
    import torch

    if torch.accelerator.is_available():
        return
    torch.Tensor.pin_memory = _same
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _same(tensor: Any, *_: object) -> Any:
    return tensor


def _unpinned(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return factory(*arguments, **options)

    return make
