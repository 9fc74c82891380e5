"""How many adapters share the engine's batches: never more at once than it was started for.

Engines of some versions end when requests under more adapters than that come together; the others let them wait, too.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable


class Slots:
    """One slot an adapter, however many requests are in flight under it. The base model needs none of these."""

    def __init__(self, count: int) -> None:
        self.waiting = 0
        self._count = count
        self._users: Counter[Hashable] = Counter()
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def taken(self, adapter: Hashable | None) -> AsyncIterator[None]:
        """Around a request: waits until its adapter has a slot or one is free."""
        if adapter is None:
            yield
            return
        self.waiting += 1
        try:
            while adapter not in self._users and len(self._users) >= self._count:
                self._freed.clear()
                await self._freed.wait()
        finally:
            self.waiting -= 1
        self._users[adapter] += 1
        try:
            yield
        finally:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
                self._freed.set()
