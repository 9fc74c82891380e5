"""The client's view of the time that counts for `Work`: the time in which an engine serves."""

import time
from collections.abc import Callable

from bridge.protocol import Pulse


class ServingClock:
    """A clock, in seconds, that stands still while the server has no engine, as far as its pulses tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lost_s = 0.0
        self._stands_since: float | None = None

    @property
    def stands_still(self) -> bool:
        """Whether the last pulse said that no engine serves."""
        return self._stands_since is not None

    def hear(self, pulse: Pulse) -> None:
        """The newest pulse."""
        now, serves = self._clock(), pulse.engine == "ready"
        if self._stands_since is None:
            self._stands_since = None if serves else now
        elif serves:
            self._lost_s += now - self._stands_since
            self._stands_since = None

    def time(self) -> float:
        """What it shows."""
        return (self._clock() if self._stands_since is None else self._stands_since) - self._lost_s
