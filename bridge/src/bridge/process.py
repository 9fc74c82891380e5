"""Start, watch and stop processes of another environment. Never by name, never by port: only what was started here."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from bridge import guard
from bridge.errors import EngineFailed

Rung = Literal["gone", "terminated", "killed"]
"""How a process ended: by itself, after SIGTERM, or after SIGKILL."""

_SLACK_S = 5.0


class GuardedProcess:
    """A command under `guard.py`: its whole family ends when asked to, and when this process ends in any way."""

    def __init__(
        self,
        guard_process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        log_path: Path,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 0
        self.returncode: int | None = None
        self.log_path = log_path
        self._guard = guard_process
        self._writer = writer
        self._exited: asyncio.Future[int] = loop.create_future()
        self._gone: asyncio.Future[str] = loop.create_future()
        self._started: asyncio.Future[int] = loop.create_future()
        self._listener = loop.create_task(self._listen(reader))

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, cwd: Path | None = None
    ) -> Self:
        """Start argv; its output is appended to log_path. Raises EngineFailed when the guard does not come up."""
        ours, theirs = socket.socketpair()
        with log_path.open("ab") as log, theirs:
            process = subprocess.Popen(  # noqa: ASYNC220 (milliseconds; its end comes through the line)
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self = cls(process, *await asyncio.open_connection(sock=ours), log_path)
        try:
            self.pid = await asyncio.wait_for(asyncio.shield(self._started), 30)
        except TimeoutError:
            process.kill()
            raise EngineFailed(f"The guard of {argv[0]} did not answer for 30 s.", log_path=str(log_path)) from None
        return self

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := (await reader.readline()).decode().split():
            match line:
                case ["STARTED", pid]:
                    self.pid = int(pid)
                    self._started.set_result(self.pid)
                case ["EXITED", code]:
                    self.returncode = int(code)
                    self._exited.set_result(self.returncode)
                case ["GONE", rung]:
                    self._gone.set_result(rung)
                case ["STUCK", *pids]:
                    self._gone.set_result("stuck " + " ".join(pids))
        self._guard_ended()

    def _guard_ended(self) -> None:
        """The line is closed. After an orderly end all is known; else the guard was killed and its child with it."""
        if not self._started.done():
            self._started.set_result(0)
        if not self._gone.done():
            if self.pid:
                _kill_group(self.pid)
            self._gone.set_result("killed")
        if self.returncode is None:
            self.returncode = -signal.SIGKILL
            self._exited.set_result(self.returncode)

    async def wait(self) -> int:
        """Wait for the command to end by itself or by stop(); its return code, negative for a signal."""
        return await asyncio.shield(self._exited)

    async def stop(self, term_s: float = 10.0, kill_s: float = 10.0) -> Rung:
        """SIGTERM, then SIGKILL after term_s; returns when nobody of the family lives.

        Raises EngineFailed when one will not die, because the kernel holds it.
        """
        if not self._gone.done():
            self._writer.write(f"STOP {term_s} {kill_s}\n".encode())
        try:
            rung = await asyncio.wait_for(asyncio.shield(self._gone), term_s + kill_s + _SLACK_S)
        except TimeoutError:
            self._guard.kill()
            rung = await asyncio.shield(self._gone)
        await self._close()
        if rung.startswith("stuck"):
            raise EngineFailed(
                f"Processes {rung.removeprefix('stuck ')} survive SIGKILL.",
                why="The kernel holds them, most often in a driver call.",
                log_path=str(self.log_path),
                remedy="Look at `dmesg`; a reboot frees them.",
            )
        return rung  # type: ignore[return-value]

    async def _close(self) -> None:
        self._writer.close()
        await self._listener
        await asyncio.to_thread(self._guard.wait)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def stop_child(child: "subprocess.Popen[bytes]", term_s: float = 10.0, kill_s: float = 10.0) -> Rung:
    """End a child of this process that leads its own session: SIGTERM, then SIGKILL to its group. Blocks."""
    if child.poll() is not None:
        return "gone"
    child.terminate()
    if _waited(child, term_s):
        return "terminated"
    _kill_group(child.pid)
    _waited(child, kill_s)
    return "killed"


def _waited(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def wait_until_gone(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Wait until none of the pids lives; those that still do at the deadline. Zombies count as gone."""
    deadline = time.monotonic() + timeout_s
    while (alive := [pid for pid in pids if pid in guard.parents()]) and time.monotonic() < deadline:
        time.sleep(guard.POLL_S)
    return alive


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log; empty when there is none. Reads at most 32 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - (32 << 10)))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
