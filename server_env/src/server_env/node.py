"""A further node of an engine that spreads over several machines: its process is kept running, and asked nothing.

The first node's tandem-server answers the trainer. The engine's processes of all nodes meet at server.dist_init_addr,
and end when one of them does: then each node starts its own again, and they meet anew.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
import uuid
from pathlib import Path

from bridge.endpoint import private_dir
from bridge.errors import EngineFailed
from server_env.config import ServerFile
from server_env.engines.backends import NOWHERE, device_of, make_engine
from server_env.ownership import own
from server_env.supervision.cache import EngineCache
from server_env.supervision.engine_process import EngineProcess
from server_env.supervision.scratch import Scratch
from server_env.supervision.supervisor import MAX_RESTARTS

log = logging.getLogger(__name__)


async def serve(file: ServerFile, run_dir: Path) -> str:
    """Run this node's part of the engine until a signal; which. Raises ConfigError, and EngineFailed in the end."""
    async with contextlib.AsyncExitStack() as stack:
        node = Node(file, private_dir(run_dir.absolute()), stack)
        return await node.run()


class Node:
    """One node. What is made here is undone by the exit stack, in the opposite order."""

    def __init__(self, file: ServerFile, run_dir: Path, stack: contextlib.AsyncExitStack) -> None:
        own(run_dir, stack)
        self._ended = asyncio.Event()
        self._why_ended = ""
        self._hurry: asyncio.Task[None] | None = None
        self._long_life_s = file.server.startup_timeout_s
        for signum in (signal.SIGTERM, signal.SIGINT):  # Before anything is made that a signal could leave behind.
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signal.Signals(signum).name)
        engine = make_engine(file)
        scratch = Scratch(uuid.uuid4().hex)
        stack.callback(scratch.remove)
        cache = EngineCache.acquire(engine.name, engine.installed_version, engine.command(NOWHERE))
        stack.callback(cache.release)
        self._rank = engine.node_rank
        self._process = EngineProcess(
            engine,
            device=device_of(file),
            scratch=scratch.path,
            cache=cache.path,
            log_path=run_dir / "engine.log",
            environment=os.environ,
        )

    def _on_signal(self, name: str) -> None:
        """The first signal ends the node; another one means now."""
        if self._ended.is_set() and self._hurry is None:
            self._hurry = asyncio.create_task(self._process.hurry())
        self._why_ended = name
        self._ended.set()

    async def run(self) -> str:
        """One life after another. A life that outlasts server.startup_timeout_s has met the others: it counts anew."""
        print(f"tandem-server runs node {self._rank} of an engine; its log: {self._process.log_path}", flush=True)
        short_lives = 0
        while True:
            started = time.monotonic()
            code = await self._live()
            if code is None:
                log.info("ending: %s", self._why_ended)
                return self._why_ended
            error = self._process.failure(f"Node {self._rank}'s part of the engine ended with code {code}.")
            log.warning("%s %s", error.what, error.why)
            short_lives = 0 if time.monotonic() - started > self._long_life_s else short_lives + 1
            if short_lives > MAX_RESTARTS:
                raise EngineFailed(
                    f"{error.what} So did the {MAX_RESTARTS} before it.",
                    why=error.why or "The first node is not there, or its engine does not start.",
                    log_path=error.log_path,
                    log_tail=error.log_tail,
                    remedy="See that log and the first node's; server.dist_init_addr must be reached from here.",
                )

    async def _live(self) -> int | None:
        """One life; its return code, or None when a signal ended it. Raises EngineFailed when it cannot be ended."""
        life = asyncio.create_task(self._process.run())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({life, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        life.cancel()
        await asyncio.wait([life])
        code = None if life.cancelled() else life.result()
        return None if self._ended.is_set() else code
