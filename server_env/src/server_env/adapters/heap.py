"""Where tandem-server receives adapters: memory that was freed is kept for the next one."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
"""Of mallopt(3), from malloc.h."""

KEEP_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Have the C library give nothing back to the system, up to 2 GiB; False where it is not glibc.

    By default each adapter arrives in fresh memory, every page of which the kernel clears and maps first: that takes
    as long as the copy itself. To be called before any thread is started, which would get an arena of its own.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    options = ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_BYTES))
    return mallopt is not None and all(mallopt(option, value) for option, value in options)
