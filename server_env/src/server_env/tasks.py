"""Waiting so that no cancellation is lost, and none reaches what must not be cut short."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that is not cut short: a cancellation, or several, is raised once it is over."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in their order. When one fails, or this is cancelled, the others are cancelled, once, and
    waited for; then the first error is raised.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        first, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [task.exception() for task in (*first, *tasks) if not task.cancelled()]
    if error := next(filter(None, errors), None):
        raise error
    return [task.result() for task in tasks]
