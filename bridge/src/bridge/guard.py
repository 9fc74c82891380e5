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
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
DEFAULT_TERM_S = 5.0
DEFAULT_KILL_S = 10.0
POLL_S = 0.02
EXIT_NOT_STARTED = 127


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def parents() -> dict[int, int]:
    """Parent pid of every process of this machine that is not a zombie."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state not in (b"Z", b"X"):
            found[int(entry.name)] = int(parent)
    return found


def descendants(root: int) -> list[int]:
    """Living processes below root, root itself not included."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    family, open_ = [], [root]
    while open_:
        below = children.get(open_.pop(), [])
        family += below
        open_ += below
    return family


def send(pid: int, signum: int, root: int) -> None:
    """Signal a descendant of root; a pid that meanwhile names somebody else is left alone."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in descendants(root):
            signal.pidfd_send_signal(handle, signum)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


class Guard:
    """One command, its family, and the line to its owner."""

    def __init__(self, line: socket.socket, command: list[str]) -> None:
        self._line = line
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._returncode: int | None = None

    def run(self) -> None:
        """Start the command and stay until its family is gone."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_asked: list[bool] = []
        signal.signal(signal.SIGTERM, lambda *_: stop_asked.append(True))
        if not self._start():
            return
        term_s, kill_s = DEFAULT_TERM_S, DEFAULT_KILL_S
        while self._returncode is None and not stop_asked:
            readable, _, _ = select.select([self._line, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                self._reap()
            if self._line in readable:
                words = self._line.recv(200).decode().split()
                if words[:1] == ["STOP"]:
                    term_s, kill_s = float(words[1]), float(words[2])
                break
        self._end(term_s, kill_s)

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
        except OSError as error:
            print(f"guard: {self._command[0]} did not start: {error.strerror}", file=sys.stderr, flush=True)
            self._tell(f"STARTED 0\nEXITED {EXIT_NOT_STARTED}\nGONE gone")
            return False
        self._tell(f"STARTED {self._child.pid}")
        return True

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

    def _end(self, term_s: float, kill_s: float) -> None:
        """The ladder: SIGTERM to the command, to its orphans, SIGKILL to all; then make sure that nobody is left."""
        assert self._child
        me = os.getpid()
        rung = "gone" if self._returncode is not None and not descendants(me) else "terminated"
        if self._returncode is None:
            send(self._child.pid, signal.SIGTERM, me)
        deadline = time.monotonic() + term_s
        told: set[int] = set()
        while (family := self._family()) and time.monotonic() < deadline:
            if self._returncode is not None:
                for pid in set(family) - told:
                    send(pid, signal.SIGTERM, me)
                    told.add(pid)
            time.sleep(POLL_S)
        deadline = time.monotonic() + kill_s
        while (family := self._family()) and time.monotonic() < deadline:
            rung = "killed"
            for pid in family:
                send(pid, signal.SIGKILL, me)
            time.sleep(POLL_S)
        left = self._family()
        self._tell(f"STUCK {' '.join(map(str, left))}" if left else f"GONE {rung}")

    def _family(self) -> list[int]:
        self._reap()
        return descendants(os.getpid())

    def _tell(self, text: str) -> None:
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
