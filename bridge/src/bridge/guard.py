"""The engine's parent: starts one command, reports on it, and ends its whole family. Standard library only.

    python -I -S guard.py FD -- COMMAND...

FD is one end of a Unix socket pair; the other end belongs to whoever wants the command to run. Lines out:
`STARTED pid`, `EXITED returncode`, `GONE rung`, `STUCK pids`. Line in: `STOP term_s kill_s`. When the other end closes,
however its owner ended, the family goes down as if by `STOP`.

The guard is a *child subreaper*: processes whose parent dies become its children, even those that left the process
group, so that "the family" is exactly "the descendants of the guard". Nobody is ever found by name or by port.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
DEFAULT_TERM_S = 5.0
DEFAULT_KILL_S = 10.0
POLL_S = 0.02
EXIT_NOT_STARTED = 127


class Process(NamedTuple):
    """What the kernel says of a living process. started: in its clock; with the pid, this names a process for good."""

    parent: int
    group: int
    started: int


class Grace(NamedTuple):
    """Seconds that the family gets before SIGKILL, and seconds after it in which it must be gone."""

    term_s: float = DEFAULT_TERM_S
    kill_s: float = DEFAULT_KILL_S


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def end_with_parent(parent: int, number: signal.Signals) -> None:
    """Get that signal when the parent, which has this pid, ends in any way; at once when it has ended already."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def living(pid: int) -> Process | None:
    """A process by its pid; None when there is none, or only a zombie.

    A process whose first thread has ended looks like a zombie as long as its other threads end: it still has children,
    and all its memory.
    """
    try:
        state, parent, group, *others = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    threads, started = int(others[14]), int(others[16])
    gone = state == b"X" or (state == b"Z" and threads < 2)
    return None if gone else Process(int(parent), int(group), started)


def processes() -> dict[int, Process]:
    """Every process of this machine that is not a zombie, by its pid."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: process for pid in pids if (process := living(pid))}


def descendants(root: int) -> list[int]:
    """Living processes below root, root itself not included."""
    children: dict[int, list[int]] = {}
    for pid, process in processes().items():
        children.setdefault(process.parent, []).append(pid)
    family, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        family += below
        open_ += below
    return family


def send(pids: Iterable[int], signum: int, root: int) -> None:
    """Signal descendants of root; a pid that meanwhile names somebody else is left alone."""
    handles: dict[int, int] = {}
    try:
        for pid in pids:
            with contextlib.suppress(OSError):  # It ended, or there are too many: the caller looks again.
                handles[pid] = os.pidfd_open(pid)
        for pid in handles.keys() & set(descendants(root)):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(handles[pid], signum)
    finally:
        for handle in handles.values():
            os.close(handle)


def _readable(descriptors: Iterable[int], seconds: float | None = None) -> set[int]:
    """Those of some descriptors that can be read, or are at their end; none when seconds pass before."""
    poller = select.poll()  # Takes any number: the line has the one that it had in its owner, who may hold thousands.
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poller.poll(None if seconds is None else seconds * 1000)}


class Guard:
    """One command, its family, and the line to its owner."""

    def __init__(self, line: socket.socket, command: list[str]) -> None:
        self._line: socket.socket | None = line
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None
        self._told_to_end = False

    def run(self) -> None:
        """Start the command and stay until its family is gone."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: what is ignored here would be ignored in the command too.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._start():
            self._end(self._wait(wake_read))

    def _on_sigterm(self, *_: object) -> None:
        self._told_to_end = True

    def _start(self) -> bool:
        parent = os.getpid()

        def follow_the_guard() -> None:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(EXIT_NOT_STARTED)

        try:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=follow_the_guard,  # noqa: PLW1509 (the guard has one thread)
            )
        except (OSError, ValueError) as error:
            print(f"guard: {self._command[0]} did not start: {error}", file=sys.stderr, flush=True)
            self._tell(f"STARTED 0\nEXITED {EXIT_NOT_STARTED}\nGONE gone")
            return False
        self._tell(f"STARTED {self._child.pid}")
        return True

    def _wait(self, wake_read: int) -> Grace:
        """Stay until the command ends by itself, somebody asks for its end, or the owner is gone."""
        while self._returncode is None and not self._told_to_end:
            assert self._line
            readable = _readable([self._line.fileno(), wake_read])
            if wake_read in readable:
                os.read(wake_read, 4096)
                self._reap()
            if self._line.fileno() in readable:
                return self._hear()
        return Grace()

    def _hear(self) -> Grace:
        """What the owner asks for. Its end is closed when it is gone, or reset when it left words of ours unread."""
        assert self._line
        try:
            words = self._line.recv(4096).decode().splitlines()
        except OSError:
            words = []
        if not words:
            self._line = None
            return Grace()
        _, term_s, kill_s = words[-1].split()
        return Grace(float(term_s), float(kill_s))

    def _reap(self) -> None:
        """Collect every dead child, adopted ones too, and say so when it was the command itself."""
        assert self._child
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._child.pid:
                self._returncode = self._child.returncode = os.waitstatus_to_exitcode(status)
                self._tell(f"EXITED {self._returncode}")

    def _end(self, grace: Grace) -> None:
        """The ladder: SIGTERM to the command, to its orphans, SIGKILL to all; then make sure that nobody is left."""
        assert self._child
        me = os.getpid()
        family = self._family()
        rung = "gone" if self._returncode is not None and not family else "terminated"
        if self._returncode is None:
            send([self._child.pid], signal.SIGTERM, me)
        began = time.monotonic()
        told: set[int] = set()
        while (family := self._family()) and time.monotonic() < began + grace.term_s:
            if self._returncode is not None:
                send(set(family) - told, signal.SIGTERM, me)
                told.update(family)
            grace = self._pause() or grace
        began = time.monotonic()
        while (family := self._family()) and time.monotonic() < began + grace.kill_s:
            rung = "killed"
            send(family, signal.SIGKILL, me)
            grace = self._pause() or grace
        left = self._family()
        self._tell(f"STUCK {' '.join(map(str, left))}" if left else f"GONE {rung}")

    def _pause(self) -> Grace | None:
        """A moment between two looks; the new grace, when the owner asks for another one meanwhile."""
        if self._line is None:
            time.sleep(POLL_S)
            return None
        return self._hear() if _readable([self._line.fileno()], POLL_S) else None

    def _family(self) -> list[int]:
        self._reap()
        return descendants(os.getpid())

    def _tell(self, text: str) -> None:
        if self._line:
            with contextlib.suppress(OSError):  # The owner may be gone; its family still has to be ended.
                self._line.sendall(text.encode() + b"\n")


def main() -> None:
    """Read the command line, become the family's subreaper, guard."""
    descriptor, dashes, *command = sys.argv[1:]
    assert dashes == "--", "usage: guard.py FD -- COMMAND..."
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    line = socket.socket(fileno=int(descriptor))
    line.set_inheritable(False)
    Guard(line, command).run()


if __name__ == "__main__":
    main()
