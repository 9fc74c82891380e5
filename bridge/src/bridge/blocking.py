"""The client for synchronous code: scripts, trainers, notebook cells. Its event loop has a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from bridge import protocol as p
from bridge.channel import OnEvent
from bridge.client import BridgeClient
from bridge.endpoint import Connection
from bridge.errors import PeerDied

T = TypeVar("T")

LAST_ANSWERS_S = 5.0
"""How long close() lets open calls take to notice that there is nobody to answer them."""


class BlockingClient:
    """`BridgeClient`, one call at a time or many through `submit`. Safe from any thread, inside a running loop too."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._client: BridgeClient | None = None
        self._lock = threading.Lock()  # Nothing is handed to the loop once it was told to end.
        self._closed = False
        self._pid = os.getpid()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._live, name="tandem-bridge", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        connection: Connection,
        *,
        run_id: str = "",
        alone: bool = False,
        again: bool = False,
        timeout_s: float = 30.0,
        on_event: OnEvent | None = None,
    ) -> Self:
        """As `BridgeClient.connect`; on_event is called on the client's thread, where it must not wait for replies."""
        self = cls()

        async def connecting() -> None:
            # On the client's thread no interrupt comes between: whoever has connected is known, and is closed.
            self._client = await BridgeClient.connect(
                connection, run_id=run_id, alone=alone, again=again, timeout_s=timeout_s, on_event=on_event
            )

        try:
            _result(self._submit(connecting()))
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
        assert threading.current_thread() is not self._thread, "on_event must not wait for a reply; use submit"
        return _result(self.submit(request, buffer))

    def submit(self, request: p.Request, buffer: bytes | memoryview | None = None) -> concurrent.futures.Future[Any]:
        """Ask without waiting. Cancelling the future cancels the request at the server."""
        assert self._client
        return self._submit(self._client.ask(request, buffer))

    def close(self) -> None:
        """Let go of the server and end the thread; open calls raise PeerDied. A second call does nothing."""
        assert threading.current_thread() is not self._thread, "on_event must not close the client"
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            with contextlib.suppress(RuntimeError):  # The thread has ended, and its loop with it.
                self._loop.call_soon_threadsafe(self._end.set)  # Each time: the first call may have been interrupted.
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        with self._lock:
            if not self._closed and os.getpid() == self._pid:  # A fork has no thread that would answer.
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise PeerDied("The client was closed, or was connected before a fork.")

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._end.wait()
        if self._client:
            await self._client.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            await asyncio.wait(calls, timeout=LAST_ANSWERS_S)


def _result(future: concurrent.futures.Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
