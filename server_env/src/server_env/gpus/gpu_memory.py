"""How much GPU memory is in use and how much is free, as the driver sees it."""

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from server_env.engines.engine import GpuMemory

POLL_S = 0.01
SETTLE_S = 5.0


def used_bytes() -> int:
    """Bytes in use on the GPUs that this process may see, by anybody; 0 on a machine without a driver."""
    pynvml = _driver()
    if pynvml is None:
        return 0
    return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in _visible(pynvml, os.environ))


def of_each(environment: Mapping[str, str]) -> tuple[GpuMemory, ...]:
    """The memory of each GPU that a process with these variables may see, in its order; none where nobody knows it."""
    pynvml = _driver()
    if pynvml is None:
        return ()
    try:
        found = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in _visible(pynvml, environment)]
    except pynvml.NVMLError:  # Of a GPU without memory of its own.
        return ()
    return tuple(GpuMemory(int(memory.free), int(memory.total)) for memory in found)


async def used_bytes_below(before: int) -> int:
    """Bytes in use, once they have fallen below `before` and stand still; after SETTLE_S, what they are then.

    A process that unmaps memory may have its answer before the driver has counted it. Without a driver there is
    nothing to wait for.
    """
    if not before:
        return before
    deadline, last = time.monotonic() + SETTLE_S, used_bytes()
    while time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        used = used_bytes()
        if used == last < before:
            break
        last = used
    return last


def _driver() -> Any:
    """NVML; None on a machine without a driver."""
    try:
        import pynvml
    except ImportError:  # In the environments for CPUs.
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _visible(pynvml: Any, environment: Mapping[str, str]) -> Iterator[Any]:
    """Handles of the GPUs, or slices of them, that CUDA_VISIBLE_DEVICES names; all where it is not set."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(pynvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
    for name in names:
        if not name:
            return
        try:
            yield pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else _by_uuid(pynvml, name)
        except pynvml.NVMLError:
            return  # As in CUDA, the list ends at what does not exist.


def _by_uuid(pynvml: Any, name: str) -> Any:
    """As in CUDA, a GPU's UUID may be shortened."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            if pynvml.nvmlDeviceGetUUID(handle).startswith(name):
                return handle
        raise
