"""What the trainer half asks its server through: the bridge's blocking client, the lasting one, or a test's own."""

from concurrent.futures import Future
from typing import Any, Protocol

from bridge.protocol import Request, Welcome


class Server(Protocol):
    """The part of the bridge's blocking client that sampling, publishing and the proof of sync need."""

    @property
    def welcome(self) -> Welcome:
        """What the server said about itself."""
        ...

    def ask(self, request: Request, buffer: bytes | memoryview | None = None) -> Any:
        """The reply, or the error that the server answers with."""
        ...

    def submit(self, request: Request, buffer: bytes | memoryview | None = None) -> Future[Any]:
        """Ask without waiting. Cancelling the future cancels the request at the server."""
        ...
