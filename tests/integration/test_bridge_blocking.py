"""The client for synchronous code: from any thread, under a running loop, interrupted at any moment."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from bridge import blocking as blocking_client
from bridge import protocol as p
from bridge.blocking import BlockingClient
from bridge.client import BridgeClient
from bridge.endpoint import Connection, write_connection
from bridge.errors import PeerDied, ProtocolMismatch, StaleVersion
from bridge_helpers import TRANSPORTS, World, descriptors, generate, generated, new_world, until


class Elsewhere:
    """A world in a thread of its own, so that a test can block."""

    def __init__(self, transport: str, folder: Path) -> None:
        self._ready: Future[World] = Future()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live(transport, folder)))
        self._thread.start()
        self.world = self._ready.result(90)
        self.loop = self._loop

    async def _live(self, transport: str, folder: Path) -> None:
        self._loop = asyncio.get_running_loop()
        async with new_world(transport, folder) as world:
            self._ready.set_result(world)
            await self._over.wait()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        asyncio.run_coroutine_threadsafe(until(condition, what), self.loop).result(100)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        self.call(self._over.set)
        self._thread.join()


@pytest.fixture(params=TRANSPORTS)
def elsewhere(request, tmp_path) -> Iterator[Elsewhere]:
    elsewhere = Elsewhere(request.param, tmp_path)
    yield elsewhere
    elsewhere.close()


@pytest.fixture
def blocking(elsewhere) -> Iterator[BlockingClient]:
    with BlockingClient.connect(elsewhere.world.connection, timeout_s=90) as client:
        yield client


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tandem-bridge"]


def test_a_blocking_question_gets_its_answer(blocking):
    assert blocking.ask(generate("one")) == generated("one")
    assert blocking.welcome.engine == "fake"


def test_a_blocking_client_works_inside_a_running_loop(elsewhere):
    async def cell() -> None:
        with BlockingClient.connect(elsewhere.world.connection) as client:
            assert client.ask(generate("one")) == generated("one")

    asyncio.run(cell())


def test_a_blocking_client_serves_many_threads(blocking):
    prompts = [f"{number}" for number in range(100)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda text: blocking.ask(generate(text)), prompts)) == [*map(generated, prompts)]


def test_many_questions_can_be_submitted_at_once(blocking):
    futures = [blocking.submit(generate(f"{number}")) for number in range(100)]
    assert [future.result(90) for future in futures] == [generated(f"{number}") for number in range(100)]


def test_a_blocking_question_raises_the_handlers_error(elsewhere, blocking):
    elsewhere.world.handler.error = StaleVersion("Gone.")
    with pytest.raises(StaleVersion, match="Gone"):
        blocking.ask(generate("refuse"))


def test_a_cancelled_future_is_cancelled_at_the_server(elsewhere, blocking):
    handler = elsewhere.world.handler
    future = blocking.submit(generate("hold"))
    elsewhere.wait(lambda: handler.prompts("hold"), "it is worked on")
    future.cancel()
    elsewhere.wait(lambda: handler.cancelled == ["hold"], "the handler was cancelled")


@pytest.fixture
def ctrl_c():
    """A test runner in the background, and pytest-xdist's, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_wait_and_the_question(elsewhere, blocking, ctrl_c):
    handler = elsewhere.world.handler

    def interrupt() -> None:
        elsewhere.wait(lambda: handler.prompts("hold"), "it is worked on")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            blocking.ask(generate("hold"))
    elsewhere.wait(lambda: handler.cancelled == ["hold"], "the handler was cancelled")
    assert blocking.ask(generate("next")) == generated("next")


def test_ctrl_c_while_connecting_leaves_nothing(tmp_path, ctrl_c, monkeypatch):
    ask = BridgeClient.ask

    async def ask_interrupted(*arguments):
        await asyncio.sleep(0.1)  # By now it is most likely waited for.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return await ask(*arguments)

    monkeypatch.setattr(BridgeClient, "ask", ask_interrupted)
    before = descriptors()
    connection = Connection(data=f"ipc://{tmp_path}/no", control=f"ipc://{tmp_path}/body", server_uuid="", pid=1)
    with pytest.raises(KeyboardInterrupt):
        BlockingClient.connect(connection)
    assert not client_threads()
    assert descriptors() == before


def test_ctrl_c_just_as_the_connection_stands_leaves_nothing(elsewhere, monkeypatch):
    before = descriptors()

    def interrupted(future):
        future.result()
        raise KeyboardInterrupt

    monkeypatch.setattr(blocking_client, "_result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        BlockingClient.connect(elsewhere.world.connection)
    assert not client_threads()
    elsewhere.wait(lambda: descriptors() <= before, "the sockets are closed")


def test_a_close_that_was_interrupted_is_done_by_the_next_one(elsewhere, monkeypatch):
    client = BlockingClient.connect(elsewhere.world.connection)

    def interrupted(*_):
        patched.undo()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(client._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert not client_threads()


def test_a_failed_connect_leaves_no_thread(elsewhere):
    elsewhere.world.handler.protocol = 99
    with pytest.raises(ProtocolMismatch):
        BlockingClient.connect(elsewhere.world.connection)
    assert not client_threads()


def test_closing_fails_the_questions_of_every_thread(elsewhere, blocking):
    futures = [blocking.submit(generate(f"hold {number}")) for number in range(20)]
    elsewhere.wait(lambda: len(elsewhere.world.handler.prompts("hold")) == 20, "they are worked on")
    blocking.close()
    for future in futures:
        assert isinstance(future.exception(60), PeerDied)
    assert not client_threads()


def test_a_closed_blocking_client_closes_again_and_answers_nothing(blocking):
    blocking.close()
    blocking.close()
    with pytest.raises(PeerDied, match="closed"):
        blocking.ask(generate("one"))


def test_many_threads_can_close_at_once(blocking):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: blocking.close(), range(8)))
    assert not client_threads()


def test_closing_while_others_ask_hangs_nobody(blocking):
    def ask_until_closed(_number: int) -> None:
        with contextlib.suppress(PeerDied):
            while True:
                blocking.ask(generate("one"))

    with ThreadPoolExecutor(8) as pool:
        asking = pool.map(ask_until_closed, range(8))
        assert blocking.ask(generate("two")) == generated("two")
        blocking.close()
        list(asking)


def test_waiting_inside_on_event_is_an_error_and_not_a_deadlock(elsewhere, caplog):
    def on_event(_event: p.Event) -> None:
        clients[0].ask(p.Ping())

    clients: list[BlockingClient] = []
    with BlockingClient.connect(elsewhere.world.connection, on_event=on_event) as client:
        clients.append(client)
        elsewhere.call(elsewhere.world.server.push, p.EngineDied(why="x"))
        elsewhere.wait(lambda: "use submit" in caplog.text, "the error is logged")
        assert client.ask(generate("one")) == generated("one")


def test_a_process_that_never_closes_its_client_still_ends(elsewhere):
    code = """
import sys
from bridge.blocking import BlockingClient
from bridge.endpoint import read_connection
from bridge.protocol import Generate
from pathlib import Path
client = BlockingClient.connect(read_connection(Path(sys.argv[1])), run_id="r")
client.ask(Generate(prompt=b"one"))
client.submit(Generate(prompt=b"hold"))
"""
    path = elsewhere.world.folder / "connection.json"
    write_connection(path, elsewhere.world.connection)
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=200, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"Traceback" not in done.stderr


def test_a_fork_of_the_process_is_refused_and_not_left_waiting(elsewhere):
    code = """
import os, sys
from bridge.blocking import BlockingClient
from bridge.endpoint import read_connection
from bridge.errors import PeerDied
from bridge.protocol import Ping
from pathlib import Path
with BlockingClient.connect(read_connection(Path(sys.argv[1]))) as client:
    if os.fork() == 0:
        try:
            client.ask(Ping())
        except PeerDied as error:
            client.close()
            os._exit("fork" in error.what)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    client.ask(Ping())
"""
    path = elsewhere.world.folder / "connection.json"
    write_connection(path, elsewhere.world.connection)
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=200, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
