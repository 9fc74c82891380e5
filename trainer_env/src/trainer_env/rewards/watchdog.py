"""Ends a process in which no thread runs any more, because a function keeps Python's lock for good."""

import faulthandler
import threading
import time
from typing import Self

_lock = threading.Lock()
_deadlines: dict["Watchdog", float] = {}
"""By time.monotonic. Python has one such timer a process, and several threads may score at once: the nearest counts."""


class Watchdog:
    """In here a thread says again and again by when it runs; if it does not, the process ends with stacks on stderr."""

    def within(self, seconds: float) -> None:
        """Promise that this thread will have called again, or have left, in that time."""
        with _lock:
            _deadlines[self] = time.monotonic() + seconds
            _arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            _deadlines.pop(self, None)
            _arm()


def _arm() -> None:
    if not _deadlines:
        faulthandler.cancel_dump_traceback_later()
        return
    left = max(0.001, min(_deadlines.values()) - time.monotonic())
    faulthandler.dump_traceback_later(left, exit=True, file=2)
