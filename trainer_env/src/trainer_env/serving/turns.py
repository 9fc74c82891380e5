"""Whose turn it is on one GPU: in time-share the server gives its memory back while the trainer trains."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bridge.protocol import Sleep, Slept, Wake
from trainer_env.serving.server import Server

SLEEP = "sleep"
"""The capability of a server that can give memory back."""


TURN_S = 120.0
"""For the server to fall asleep, or to wake."""


@dataclass(frozen=True)
class Turned:
    """What the turns of one optimizer step took, in seconds of waiting; None where there were none.

    freed_bytes: GPU memory that the last sleep gave back.
    """

    sleep_s: float | None = None
    wake_s: float | None = None
    freed_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """Of both."""
        return (self.sleep_s or 0.0) + (self.wake_s or 0.0)


def sleep_first(server: Server, timeout_s: float = TURN_S) -> None:
    """The trainer is about to load: the server sleeps, if it can. Raises what it answers."""
    if SLEEP in server.welcome.capabilities:
        server.ask(Sleep(deadline_s=timeout_s))


def release_gpu_memory() -> None:
    """Give back what torch keeps on the GPU for itself, for the other half to take. Without torch that is nothing."""
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


class Turns:
    """Without a server the two halves compute whenever they like.

    With one, it sleeps but for `servers`, where several threads may be at once. release: gives back what the trainer
    holds on the GPU and does not need. timeout_s: for the server to fall asleep, or to wake.
    """

    def __init__(
        self,
        server: Server | None = None,
        *,
        release: Callable[[], None] = lambda: None,
        timeout_s: float = TURN_S,
    ) -> None:
        self._server = server
        self._release = release
        self._timeout_s = timeout_s
        self._turned = Turned()
        self._turning = threading.Lock()
        self._inside: set[object] = set()
        """A mark for each of those whose turn it is with the server."""

    def make_room(self) -> None:
        """Before the server takes memory, to load an adapter for instance."""
        if self._server:
            self._release()

    @contextmanager
    def servers(self) -> Iterator[None]:
        """The server's turn: awake in here, asleep once everybody has left. What the last one raises leaves it awake.

        Raises what the server answers when it cannot wake or sleep.
        """
        if self._server is None:
            yield
            return
        mark = object()
        try:
            with self._turning:
                if not self._inside:
                    self._wake(self._server)
                self._inside.add(mark)
            yield
            with self._turning:
                self._inside.discard(mark)
                if not self._inside:
                    self._sleep(self._server)
        finally:
            self._inside.discard(mark)

    def sleep_again(self) -> None:
        """The server has woken for an adapter, and the turn is still the trainer's. Raises what it answers."""
        if self._server:
            self._release()
            with self._turning:
                if not self._inside:  # Else whoever leaves last puts it to sleep.
                    self._sleep(self._server)

    def _wake(self, server: Server) -> None:
        started = time.perf_counter()
        self._release()
        server.ask(Wake(deadline_s=self._timeout_s))
        self._turned = replace(self._turned, wake_s=(self._turned.wake_s or 0.0) + time.perf_counter() - started)

    def _sleep(self, server: Server) -> None:
        started = time.perf_counter()
        slept: Slept = server.ask(Sleep(deadline_s=self._timeout_s))
        self._turned = replace(
            self._turned,
            sleep_s=(self._turned.sleep_s or 0.0) + time.perf_counter() - started,
            freed_bytes=slept.freed_bytes,
        )

    def take(self) -> Turned:
        """What the turns took since this was last asked."""
        turned, self._turned = self._turned, Turned()
        return turned
