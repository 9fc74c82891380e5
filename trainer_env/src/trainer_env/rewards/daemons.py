"""Work in daemon threads: what never ends is left behind, and the process can exit all the same."""

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")
Value = TypeVar("Value")

Outcome = tuple[int, Value | BaseException]
"""The place of an item, and what came of it: a value, or what was raised."""


def start(work: Callable[[Item], Value], items: Sequence[Item], at_once: int | None = None) -> SimpleQueue[Outcome]:
    """Work on all items, at most `at_once` (None: all) at a time, in the caller's context. Gives each as they end."""
    waiting: SimpleQueue[tuple[int, Item]] = SimpleQueue()
    for place in enumerate(items):
        waiting.put(place)
    done: SimpleQueue[Outcome] = SimpleQueue()

    def run() -> None:
        while True:
            try:
                place, item = waiting.get_nowait()
            except Empty:
                return
            try:
                outcome = work(item)
            except BaseException as error:  # noqa: BLE001 (it is raised where it is waited for)
                outcome = error
            done.put((place, outcome))

    for _ in range(min(len(items), at_once or len(items))):
        threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name="reward").start()
    return done


def each(work: Callable[[Item], Value], items: Sequence[Item], at_once: int) -> list[Value]:
    """What comes of each item, in their order. Raises what the first one to fail raised."""
    done = start(work, items, at_once)
    values: dict[int, Value] = {}
    for _ in items:
        place, outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        values[place] = outcome
    return [values[place] for place in range(len(items))]


def within(
    seconds: float, work: Callable[[Item], Value], items: Sequence[Item], at_once: int | None = None
) -> dict[int, Value | BaseException]:
    """What came, within some seconds, of each item that ended by then."""
    done, deadline = start(work, items, at_once), time.monotonic() + seconds
    ended: dict[int, Value | BaseException] = {}
    try:
        while len(ended) < len(items):
            place, outcome = done.get(timeout=max(0.0, deadline - time.monotonic()))
            ended[place] = outcome
    except Empty:
        pass
    return ended
