"""Time limits that stand still while no engine serves: to start one again may take longer than any of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ServingTime:
    """The time in which an engine serves, which is what the limits of work are counted in."""

    def __init__(self) -> None:
        self._passes = True
        self._left: dict[asyncio.Timeout, float] = {}
        """Of each open limit, in seconds: what was left when time last stood still, or all of it."""

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As asyncio.timeout, in this time."""
        async with asyncio.timeout(seconds if self._passes else None) as limit:
            self._left[limit] = seconds
            try:
                yield limit
            finally:
                del self._left[limit]

    def passes(self, serves: bool) -> None:  # noqa: FBT001 (it is a value, no switch)
        """From now on time passes if an engine serves, and else stands still."""
        if serves == self._passes:
            return
        self._passes = serves
        for limit, left in self._left.items():
            if not limit.expired():
                now = asyncio.get_running_loop().time()
                until = limit.when()
                self._left[limit] = left if until is None else until - now
                limit.reschedule(now + left if serves else None)
