"""How many adapters share one engine's batches: never more at once than it was started for.

Engines of some versions end when requests under more adapters than that come together; the others let them wait, too.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

GUEST = "canary"
"""Stands for whichever canary is being asked: an adapter that takes a slot and never serves."""


class Slots:
    """One slot an adapter, however many requests are in flight under it. Adapters go by the engine's names.

    The base model, whose name is empty, needs none of these. freed: called when a slot is free again.
    """

    def __init__(self, count: int, freed: Callable[[], None]) -> None:
        self._count = count
        self._freed = freed
        self._users: Counter[str] = Counter()

    def room_for(self, adapter: str) -> bool:
        """Whether a request under this adapter may go to the engine now."""
        return not adapter or adapter in self._users or len(self._users) < self._count

    @contextlib.contextmanager
    def taken(self, adapter: str) -> Iterator[None]:
        """Around a request for which there is room."""
        if not adapter:
            yield
            return
        self._users[adapter] += 1
        try:
            yield
        finally:
            self._users[adapter] -= 1
            if not self._users[adapter]:
                del self._users[adapter]
                self._freed()
