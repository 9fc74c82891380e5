"""The name under which SGLang imports its compiled kernels, where there are none.

Importing anything from here succeeds, calling it raises NotImplementedError. No torch operator is registered, so that
SGLang sees no AMX support and takes the `forward_native` of each layer.

Remove when SGLang has wheels of its CPU kernels on the package index that run on any x86-64, or imports none of them
on a machine without AMX.
"""

from collections.abc import Callable
from typing import Any

__version__ = "0.0.0"


def assign_req_to_token_pool_cpu(  # noqa: PLR0917 (SGLang calls it so)
    req_pool_indices: Any, req_to_token: Any, start: Any, end: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Write consecutive slices of out_cache_loc into rows of req_to_token, each from its start to its end."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        assert last <= pool_len
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first]
        taken += last - first


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this machine runs SGLang without compiled kernels")

    return missing
