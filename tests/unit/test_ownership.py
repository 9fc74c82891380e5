"""One tandem-server a run directory, and those who only look keep none out."""

import contextlib
import fcntl
import time

import pytest

from bridge.errors import ConfigError
from server_env import ownership


async def test_somebody_who_looks_whether_a_folder_is_held_keeps_no_server_out(tmp_path, monkeypatch):
    looking = (tmp_path / "server.lock").open("wb")
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: looking.close())
    async with contextlib.AsyncExitStack() as stack:
        ownership.own(tmp_path, stack)
    assert looking.closed


async def test_a_folder_that_is_held_is_refused(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        ownership.own(tmp_path, stack)
        async with contextlib.AsyncExitStack() as other:
            with pytest.raises(ConfigError, match="already serves"):
                ownership.own(tmp_path, other)
