"""The client for synchronous code: scripts, trainers, notebook cells. Its event loop has a thread of its own."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from bridge import protocol as p
from bridge.client import BridgeClient, OnEvent
from bridge.endpoint import Connection

T = TypeVar("T")


class BlockingClient:
    """`BridgeClient`, one call at a time or many through `submit`. Safe from any thread, inside a running loop too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tandem-bridge", daemon=True)
        self._thread.start()
        self._client: BridgeClient | None = None

    @classmethod
    def connect(
        cls,
        connection: Connection,
        *,
        run_id: str = "",
        timeout_s: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> Self:
        """As `BridgeClient.connect`; on_event is called on the client's thread."""
        self = cls()
        try:
            self._client = self._run(
                BridgeClient.connect(connection, run_id=run_id, timeout_s=timeout_s, on_event=on_event)
            )
        except BaseException:
            self.close()
            raise
        return self

    @property
    def welcome(self) -> p.Welcome:
        """What the server said about itself."""
        assert self._client
        return self._client.welcome

    def ask(self, request: p.Request, buffer: bytes | memoryview | None = None) -> Any:
        """As `BridgeClient.ask`. An interrupt (Ctrl-C) cancels the request at the server too."""
        return _result(self.submit(request, buffer))

    def submit(self, request: p.Request, buffer: bytes | memoryview | None = None) -> concurrent.futures.Future[Any]:
        """Ask without waiting. Cancelling the future cancels the request at the server."""
        assert self._client
        return asyncio.run_coroutine_threadsafe(self._client.ask(request, buffer), self._loop)

    def close(self) -> None:
        """Let go of the server and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        if self._client:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return _result(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


def _result(future: concurrent.futures.Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
