"""Requests that an engine takes together, and those that it must have alone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Many at once through `shared`, or a single one through `alone`, which goes before those that come after it.

    open: lets everybody through at any time.
    """

    def __init__(self, *, open: bool = False) -> None:  # noqa: A002 (it reads so)
        self._open = open
        self._inside = 0
        self._alone = False
        self._waiting = 0
        self._left = asyncio.Event()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Around a request that others may share a batch with."""
        while (self._alone or self._waiting) and not self._open:
            await self._next()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._left.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Around a request with which no other may be in flight."""
        self._waiting += 1
        try:
            while (self._alone or self._inside) and not self._open:
                await self._next()
            self._alone = True
        finally:
            self._waiting -= 1
            self._left.set()
        try:
            yield
        finally:
            self._alone = False
            self._left.set()

    async def _next(self) -> None:
        self._left.clear()
        await self._left.wait()
