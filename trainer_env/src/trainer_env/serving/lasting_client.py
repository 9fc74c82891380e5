"""The client that a run asks through from start to end, whatever becomes of its server.

When tandem-server dies, another one takes its place, gets the last adapter, and is asked what was open: to those who
wait for an answer only time has passed. An answer that had come is kept, and a question has one answer, so nothing is
sampled twice into training.
"""

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from bridge import protocol as p
from bridge.blocking import BlockingClient
from bridge.errors import BridgeError, PeerDied

Renew = Callable[[PeerDied, int], BlockingClient]
"""Called when a server is gone, with the error and the version it served: a client of another one, or the reason why
there is none, raised. Called on a thread of its own.
"""


class _Question:
    """What somebody waits for. asked: the same at the server of the moment; None while there is none."""

    def __init__(self, request: p.Request, buffer: bytes | memoryview | None) -> None:
        self.request = request
        self.buffer = buffer
        self.answer: Future[Any] = Future()
        self.asked: Future[Any] | None = None


class LastingClient:
    """As `BlockingClient`, of which it uses one after the other."""

    def __init__(self, client: BlockingClient, renew: Renew) -> None:
        self.welcome = client.welcome
        self._client: BlockingClient | None = client
        self._renew = renew
        self._lock = threading.RLock()  # A future that is done calls back at once, on the thread that asks.
        self._open: list[_Question] = []
        self._last: tuple[p.PublishAdapter, bytes | memoryview] | None = None
        self._renewal: threading.Thread | None = None
        self._failure: BridgeError | None = None

    def ask(self, request: p.Request, buffer: bytes | memoryview | None = None) -> Any:
        """As `BlockingClient.ask`."""
        future = self.submit(request, buffer)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, request: p.Request, buffer: bytes | memoryview | None = None) -> Future[Any]:
        """As `BlockingClient.submit`. What is asked while there is no server is asked when there is one again."""
        question = _Question(request, buffer)
        question.answer.add_done_callback(lambda future: self._forget(question) if future.cancelled() else None)
        with self._lock:
            if self._failure:
                question.answer.set_exception(copy.copy(self._failure))
                return question.answer
            self._open.append(question)
            if self._client:
                self._ask(self._client, question)
        return question.answer

    def give_up(self) -> None:
        """From now on a server that dies stays dead: whoever waits for the next one gets PeerDied."""
        self._fail(PeerDied("The client was closed."), of=lambda question: question.asked is None)

    def last_words(self, request: p.Request) -> None:
        """Ask the server of the moment something after `give_up`. Raises PeerDied when there is none."""
        client = self._client
        if client is None:
            raise PeerDied("The server is gone.")
        client.ask(request)

    def close(self) -> None:
        """Let go of the server. To be called when no server can come any more, or none that is being waited for."""
        self.give_up()
        if self._renewal:
            self._renewal.join()
        if self._client:
            self._client.close()

    def _ask(self, client: BlockingClient, question: _Question) -> None:
        try:
            asked = client.submit(question.request, question.buffer)
        except PeerDied as error:
            self._lost(error)
            return
        question.asked = asked
        asked.add_done_callback(lambda future: self._answered(question, future))

    def _answered(self, question: _Question, asked: Future[Any]) -> None:
        error = PeerDied("The client was closed.") if asked.cancelled() else asked.exception()
        with self._lock:
            if question.asked is not asked:  # Cancelled by whoever asked.
                return
            if isinstance(error, PeerDied) and not self._failure:
                question.asked = None
                self._lost(error)
                return
            self._open.remove(question)
            if error is None and isinstance(question.request, p.PublishAdapter) and question.buffer is not None:
                self._last = question.request, question.buffer
        _settle(question.answer, error, None if error else asked.result())

    def _forget(self, question: _Question) -> None:
        """Whoever asked does not want to know any more."""
        with self._lock:
            if question in self._open:
                self._open.remove(question)
            asked, question.asked = question.asked, None
        if asked:
            asked.cancel()

    def _lost(self, error: PeerDied) -> None:
        """The server is gone: look for another one, unless that is being done. Called with the lock held."""
        client, self._client = self._client, None
        if client:
            self._renewal = threading.Thread(
                target=self._replace, args=(client, error), name="tandem-server-renewal", daemon=True
            )
            self._renewal.start()

    def _replace(self, client: BlockingClient, error: PeerDied) -> None:
        try:
            client.close()  # What is still open there comes back as PeerDied.
            client = self._next(error)
        except BaseException as failure:  # noqa: BLE001 (whoever waits for an answer is to hear of it)
            self._fail(failure if isinstance(failure, BridgeError) else BridgeError(f"No server: {failure!r}."))
            return
        with self._lock:
            closing = self._failure is not None
            if not closing:
                self.welcome = client.welcome
                self._client = client
                for question in list(self._open):
                    if self._client is client and question.asked is None:
                        self._ask(client, question)
        if closing:
            client.close()

    def _next(self, error: PeerDied) -> BlockingClient:
        """A client of a server that serves the last version."""
        while True:
            client = self._renew(error, self._last[0].version if self._last else 0)
            try:
                if self._last:
                    client.ask(*self._last)
            except PeerDied as again:
                client.close()
                error = again
            except BaseException:
                client.close()
                raise
            else:
                return client

    def _fail(self, error: BridgeError, of: Callable[[_Question], bool] = lambda _: True) -> None:
        """No question is asked any more, and those that `of` names will not be answered."""
        with self._lock:
            self._failure = self._failure or error
            failed = [question for question in self._open if of(question)]
            self._open = [question for question in self._open if question not in failed]
        for question in failed:
            _settle(question.answer, copy.copy(self._failure), None)


def _settle(future: Future[Any], error: BaseException | None, result: Any) -> None:
    """Answer, unless it was cancelled."""
    if future.set_running_or_notify_cancel():
        if error:
            future.set_exception(error)
        else:
            future.set_result(result)
