"""A moment that no signal handler of this process breaks into."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the end of this block, where this process has handlers for them.

    For starting a child: a handler that raises between its birth and the moment when it has a name here leaves it to
    nobody. Signals are not blocked, and those that are ignored stay so: a child would inherit either.
    """
    if threading.current_thread() is not threading.main_thread():  # No handler runs here.
        yield
        return
    came: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)
