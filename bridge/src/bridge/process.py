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
from typing import Literal, Self, cast

from bridge import guard
from bridge.errors import EngineFailed

Rung = Literal["gone", "terminated", "killed"]
"""How a process ended: by itself, after SIGTERM, or after SIGKILL."""

START_S = 30.0
SLACK_S = 5.0
"""How much longer than its own ladder the guard may take to report."""
DYING_S = 5.0
"""For those who were killed to be gone."""


class GuardedProcess:
    """A command under `guard.py`: its whole family ends when asked to, and when this process ends in any way."""

    def __init__(self, guard_process: "subprocess.Popen[bytes]", line: socket.socket, log_path: Path) -> None:
        loop = asyncio.get_running_loop()
        self.pid = 0
        self.returncode: int | None = None
        self.log_path = log_path
        self._guard = guard_process
        self._line = line
        self._started: asyncio.Future[int] = loop.create_future()
        self._exited: asyncio.Future[int] = loop.create_future()
        self._rung: Rung | None = None
        self._stuck: list[str] = []
        self._listener = loop.create_task(self._listen())

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], log_path: Path, cwd: Path | None = None
    ) -> Self:
        """Start argv; its output is appended to log_path. A command that does not exist ends with return code 127.

        Raises EngineFailed when the guard does not come up. Cancelled, it leaves nobody behind.
        """
        self = cls(*_start_guard(argv, dict(env), log_path, cwd), log_path)
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._started)
        except TimeoutError:
            await self.stop(0)
            raise EngineFailed(
                f"The guard of {argv[0]} did not answer for {START_S:g} s.", log_path=str(log_path)
            ) from None
        except asyncio.CancelledError:
            await self.stop(0)
            raise
        return self

    async def wait(self) -> int:
        """Wait for the command to end by itself or by stop(); its return code, negative for a signal."""
        return await asyncio.shield(self._exited)

    async def stop(self, term_s: float = 10.0, kill_s: float = 10.0) -> Rung:
        """SIGTERM, then SIGKILL after term_s; returns when nobody of the family lives.

        Called again while it runs, the newer times count. Raises EngineFailed when somebody will not die, because the
        kernel holds it.
        """
        with contextlib.suppress(OSError):  # The guard is gone already.
            self._line.send(f"STOP {term_s} {kill_s}\n".encode())
        try:
            async with asyncio.timeout(term_s + kill_s + SLACK_S):
                await asyncio.shield(self._listener)
        except TimeoutError:
            family = self._end_without_the_guard()
            await asyncio.shield(self._listener)
            self._stuck = [str(pid) for pid in await asyncio.to_thread(wait_until_gone, family, DYING_S)]
        if self._stuck:
            raise EngineFailed(
                f"Processes {' '.join(self._stuck)} survive SIGKILL.",
                why="The kernel holds them, most often in a driver call.",
                log_path=str(self.log_path),
                remedy="Look at `dmesg`; a reboot frees them.",
            )
        assert self._rung
        return self._rung

    async def _listen(self) -> None:
        """Take in what the guard says until it is gone; then all that is known of the command is final."""
        loop, rest = asyncio.get_running_loop(), b""
        try:
            while data := await loop.sock_recv(self._line, 4096):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take_in(line.decode().split())
        except OSError:  # The guard was killed with words of ours unread.
            pass
        finally:
            self._line.close()
            await asyncio.to_thread(self._bury_guard)
            self._rung = self._rung or "killed"
            if self.returncode is None:
                self._set_returncode(-signal.SIGKILL)
            self._set_started(0)

    def _take_in(self, words: list[str]) -> None:
        match words:
            case ["STARTED", pid]:
                self._set_started(int(pid))
            case ["EXITED", code]:
                self._set_returncode(int(code))
            case ["GONE", rung]:
                self._rung = cast("Rung", rung)
            case ["STUCK", *pids]:
                self._stuck = pids

    def _set_started(self, pid: int) -> None:
        if not self._started.done():
            self.pid = pid
            self._started.set_result(pid)

    def _set_returncode(self, code: int) -> None:
        self.returncode = code
        self._exited.set_result(code)

    def _bury_guard(self) -> None:
        """Reap the guard. It ends last, unless it was killed: then its command dies with it, and the group here."""
        if self._guard.wait() != 0 and self.pid:
            end_group(self.pid, guard.DEFAULT_KILL_S)

    def _end_without_the_guard(self) -> dict[int, int]:
        """The guard itself does not answer, because it was stopped or starves. The family, which is dying now."""
        family = family_of(self._guard.pid)
        guard.send(family, signal.SIGKILL, self._guard.pid)
        self._guard.kill()
        return family


def _start_guard(
    argv: Sequence[str], env: dict[str, str], log_path: Path, cwd: Path | None
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    try:
        with theirs, log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
    except OSError as error:
        ours.close()
        raise EngineFailed(f"{argv[0]} could not be started: {error}.", log_path=str(log_path)) from None
    return process, ours


def end_group(pgid: int, timeout_s: float) -> list[int]:
    """SIGKILL a process group that this process started; who of it still lives after timeout_s. Blocks."""
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid, process in guard.processes().items() if process.group == pgid]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(guard.POLL_S)
    return alive


def stop_child(child: "subprocess.Popen[bytes]", term_s: float = 10.0, kill_s: float = 10.0) -> Rung:
    """End a child of this process that leads its own session: SIGTERM, then SIGKILL to its group. Blocks.

    Raises EngineFailed when somebody will not die, because the kernel holds it.
    """
    if child.returncode is not None:  # Collected already: its pid may be somebody else's by now.
        return "gone"
    rung: Rung = "gone"
    if not _ended(child, 0):
        with contextlib.suppress(ProcessLookupError):  # Somebody else collects it just now.
            os.kill(child.pid, signal.SIGTERM)
        rung = "terminated" if _ended(child, term_s) else "killed"
    left = end_group(child.pid, kill_s)
    if left or not _ended(child, kill_s):
        raise EngineFailed(f"Processes {left or [child.pid]} survive SIGKILL.", remedy="Look at `dmesg`.")
    child.wait()
    return rung


def _ended(child: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether a child ends in that time. It is not collected, so that its pid and group still name nobody else."""
    deadline = time.monotonic() + seconds
    try:
        while not os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                return False
            time.sleep(guard.POLL_S)
    except ChildProcessError:  # Somebody else collected it.
        pass
    return True


def family_of(root: int) -> dict[int, int]:
    """Who lives below root, by pid, and when each began: what `wait_until_gone` takes."""
    living = guard.processes()
    return {pid: living[pid].started for pid in guard.descendants(root) if pid in living}


def wait_until_gone(family: Mapping[int, int], timeout_s: float) -> list[int]:
    """Wait until none of a family lives; the pids of those that still do at the deadline. Zombies count as gone, and so
    does a pid that has come to mean somebody else.
    """
    deadline = time.monotonic() + timeout_s
    while (alive := living_of(family)) and time.monotonic() < deadline:
        time.sleep(guard.POLL_S)
    return alive


def living_of(family: Mapping[int, int]) -> list[int]:
    """Those of a family that live, by pid."""
    found = ((pid, started, guard.living(pid)) for pid, started in family.items())
    return [pid for pid, started, process in found if process and process.started == started]


def log_tail(path: Path, lines: int = 20) -> str:
    """The last lines of a log; empty when it cannot be read. Reads at most 32 KiB."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - (32 << 10)))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
