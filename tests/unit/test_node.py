"""A further node's signals: none comes before it is heard, and none hides what could not be ended."""

import asyncio
import contextlib
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.errors import EngineFailed
from server_env import node
from server_env.config import ServerFile, from_dict


class Process:
    """One life, which ends as it is told: with an error when it is cancelled."""

    log_path = "engine.log"

    def __init__(self, error):
        self.error = error

    async def run(self):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.error:
                raise self.error from None
            raise


@pytest.fixture
async def made(tmp_path, monkeypatch):
    """A node, and whether a signal would have been heard when its folder was made."""
    heard = []

    class Scratch:
        path = tmp_path

        def __init__(self, _uuid):
            heard.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)

        def remove(self):
            pass

    engine = SimpleNamespace(name="vllm", installed_version="1", node_rank=1, command=lambda _: ["engine"])
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(node, "Scratch", Scratch)
    monkeypatch.setattr(node, "make_engine", lambda _: engine)
    file = from_dict({"server": {"model": "m"}}, "test")
    assert isinstance(file, ServerFile)
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        yield node.Node(file, tmp_path, stack), heard
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(signum)


async def test_a_signal_is_heard_before_anything_is_made_that_it_could_leave_behind(made):
    assert made[1] == [True]


async def test_what_could_not_be_ended_is_told_although_a_signal_asked_for_the_end(made):
    process: Any = Process(EngineFailed("Processes 7 survive SIGKILL."))
    made[0]._process = process
    running = asyncio.create_task(made[0].run())
    await asyncio.sleep(0.01)
    made[0]._on_signal("SIGTERM")
    with pytest.raises(EngineFailed, match="survive"):
        await running


async def test_a_signal_ends_it(made):
    process: Any = Process(None)
    made[0]._process = process
    running = asyncio.create_task(made[0].run())
    await asyncio.sleep(0.01)
    made[0]._on_signal("SIGTERM")
    assert await running == "SIGTERM"
