"""One life of an engine: started, watched until it answers a real generation, stopped with its whole family."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shlex
import shutil
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from bridge.endpoint import private_dir, write_private
from bridge.errors import BridgeError, EngineFailed, Refused
from bridge.process import GuardedProcess, Rung, log_tail
from server_env.engines.engine import Endpoint, Engine, EngineFacts, EngineGone
from server_env.gpus import gpu_memory
from server_env.supervision.environment import cleaned

log = logging.getLogger(__name__)

POLL_S = 0.1
START_TRIES = 3
TERM_S = 10.0
KILL_S = 10.0
FAILED_START_TERM_S = 2.0
TAIL_LINES = 30

_CLASH = re.compile(r"EADDRINUSE|address already in use|\bport\b.{0,40}\b(?:in use|not available)", re.IGNORECASE)
_CAUSE = re.compile(r"\b((?:[\w.]*(?:Error|Exception))\b: .*)")
_CONSEQUENCE = re.compile(
    r"initialization failed|See root cause|EngineDead|Engine process failed|Ignore import error", re.IGNORECASE
)


class EngineProcess:
    """The engine's process. It listens on a new socket each life, so that nothing of the last life is in the way."""

    def __init__(
        self, engine: Engine, *, device: str, scratch: Path, cache: Path, log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self.engine = engine
        self.name = log_path.stem
        self.log_path = log_path
        self.lives = 0
        self._device = device
        self._scratch = scratch
        self._cache = cache
        self._environment = environment
        self._process: GuardedProcess | None = None
        self._secrets: tuple[bytes, ...] = ()
        self._hurried = False
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The engine's process id; 0 when there is none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    async def start(self, timeout_s: float) -> EngineFacts:
        """Start it and wait until it answers one token. Raises EngineFailed with the end of its log."""
        for tries_left in reversed(range(START_TRIES)):
            try:
                return await self._start_once(timeout_s)
            except EngineFailed:
                # Engines pick the ports of their inner processes themselves, and another program may be quicker.
                if not (tries_left and _CLASH.search(self._life_log())):
                    raise
                log.warning("%s met a port in use; starting it again", self.name)
        raise AssertionError("unreachable")

    async def _start_once(self, timeout_s: float) -> EngineFacts:
        started = time.monotonic()
        async with self._spawned() as (process, endpoint):
            try:
                await self.engine.connect(endpoint)
                facts = await self._until_it_answers(process, timeout_s)
            except BaseException:
                await self.stop(FAILED_START_TERM_S)
                raise
        log.info("%s answers after %.1f s (pid %d)", self.name, time.monotonic() - started, self.pid)
        return facts

    async def run(self) -> int:
        """One life that nobody asks anything, from its start to its end; its return code. Cancelled, it is ended."""
        async with self._spawned() as (process, _):
            try:
                return await process.wait()
            finally:
                await self.stop()

    @contextlib.asynccontextmanager
    async def _spawned(self) -> AsyncIterator[tuple[GuardedProcess, Endpoint]]:
        """A new life's process, which may read the files made for it in here only."""
        self.lives += 1
        endpoint = self._endpoint()
        environment = {**cleaned(self._environment, self._device), **self.engine.environment(self._cache, endpoint)}
        if self._device == "cuda":
            endpoint = replace(endpoint, gpus=gpu_memory.of_each(environment))
        command = self._command(endpoint)
        private = self.engine.private_files(endpoint)
        log.info("starting %s (life %d): %s", self.name, self.lives, shlex.join(command))
        for path, content in private.items():
            write_private(path, content.encode())
        try:
            self._process = await GuardedProcess.start(command, env=environment, log_path=self.log_path)
            yield self._process, endpoint
        finally:
            for path in private:
                path.unlink(missing_ok=True)
            self._erase_secrets()

    def _command(self, endpoint: Endpoint) -> list[str]:
        """What to run; the life's first line of the log, as is why there is nothing to run."""
        try:
            command = self.engine.command(endpoint)
        except BridgeError as refusal:
            self._mark_log(f"{refusal.what} {refusal.why}")
            raise
        self._mark_log(shlex.join(command))
        return command

    def _endpoint(self) -> Endpoint:
        """A new one each life. A port that is free now may be taken when the engine gets to it: see `start`."""
        self._clear()
        folder = private_dir(self._scratch / str(self.lives))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        keys = secrets.token_hex(32), secrets.token_hex(32)  # No signs: a key may be read from a command line.
        self._secrets = tuple(key.encode() for key in keys)
        return Endpoint(folder / "engine.sock", folder, port, *keys)

    def _clear(self) -> None:
        """Remove what earlier lives left of their inner sockets: there may be many of them."""
        for folder in self._scratch.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    async def _until_it_answers(self, process: GuardedProcess, timeout_s: float) -> EngineFacts:
        answered = asyncio.create_task(self._answer())
        died = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({answered, died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answered.done():
                return answered.result()
            if died.done():
                raise self.failure(f"The engine ended with code {died.result()} while it was starting.")
            raise self.failure(
                f"The engine was not ready after {timeout_s:g} s.",
                remedy="If its log shows that it was still loading, raise server.startup_timeout_s.",
            )
        finally:
            for task in (answered, died):
                task.cancel()
            await asyncio.gather(answered, died, return_exceptions=True)

    async def _answer(self) -> EngineFacts:
        while True:
            try:
                return await self.engine.probe()
            except EngineGone:
                await asyncio.sleep(POLL_S)
            except Refused as error:
                raise self.failure(f"The engine started, and refused its first request: {error.what}") from None

    async def wait(self) -> int:
        """Wait until it ends; its return code."""
        assert self._process
        return await self._process.wait()

    async def stop(self, term_s: float = TERM_S) -> Rung:
        """End it: connections first (it would wait for them), then the ladder. Its family is gone afterwards."""
        process, life = self._process, self.lives
        await self.engine.close()
        if process is None:
            return "gone"
        rung = await process.stop(0 if self._hurried else term_s, KILL_S)
        log.info("%s (life %d) is gone: %s", self.name, life, rung)
        return rung

    async def hurry(self) -> None:
        """Kill it now, and whatever is stopped from here on."""
        self._hurried = True
        await self.stop()

    def failure(self, what: str, remedy: str = "") -> EngineFailed:
        """An EngineFailed about this life, with the cause that its log names."""
        self._erase_secrets()
        return EngineFailed(
            what,
            why=self._cause(),
            log_path=str(self.log_path),
            log_tail=log_tail(self.log_path, TAIL_LINES),
            remedy=remedy or "Look for the first error in that log; `scripts/doctor.py` checks the machine.",
        )

    def _mark_log(self, line: str) -> None:
        with self.log_path.open("ab") as file:
            file.write(f"--- life {self.lives}: {line}\n".encode())
            self._log_start = file.seek(0, os.SEEK_END)

    def _erase_secrets(self) -> None:
        """Engines log their configuration, keys included: write over them, in place, for the engine appends."""
        with self.log_path.open("r+b") as file:
            file.seek(self._log_start)
            text = file.read()
            for secret in self._secrets:
                for found in re.finditer(re.escape(secret), text):
                    file.seek(self._log_start + found.start())
                    file.write(b"*" * len(secret))

    def _life_log(self) -> str:
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _cause(self) -> str:
        """The first exception of this life that is not the consequence of another."""
        for line in self._life_log().splitlines():
            found = _CAUSE.search(line)
            if found and not _CONSEQUENCE.search(line):
                return found[1][:500]
        return ""
