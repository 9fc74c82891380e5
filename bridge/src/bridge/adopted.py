"""A process that was started by somebody else and is to be watched and ended from here."""

import contextlib
import os
import select
import signal
from typing import Self

from bridge import guard
from bridge.errors import EngineFailed
from bridge.process import Rung


class Adopted:
    """Known by a handle of the kernel's, which never comes to mean another process as a pid does.

    Its exit code is for its parent only: here it has none.
    """

    def __init__(self, pid: int, handle: int) -> None:
        self.pid = pid
        self._handle: int | None = handle

    @classmethod
    def find(cls, pid: int, started: int) -> Self | None:
        """The process that has this pid and began at `started` (see `guard.Process`); None when it is gone."""
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            return None
        process = guard.living(pid)  # Looked at once the handle is there: they mean the same process if this one lives.
        if process is None or process.started != started:
            os.close(handle)
            return None
        return cls(pid, handle)

    def poll(self) -> int | None:
        """None while it lives, as for a child; then 0, whatever it ended with."""
        return 0 if self.ended(0) else None

    def ended(self, seconds: float) -> bool:
        """Whether it ends in that time. One that is let go of counts as ended."""
        if (handle := self._handle) is None:
            return True
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def stop(self, term_s: float, kill_s: float) -> Rung:
        """SIGTERM, then SIGKILL after term_s. Blocks. Raises EngineFailed when it will not die."""
        rung: Rung = "gone"
        if not self.ended(0):
            self._send(signal.SIGTERM)
            rung = "terminated"
        if not self.ended(term_s):
            self._send(signal.SIGKILL)
            rung = "killed"
        if not self.ended(kill_s):
            raise EngineFailed(f"Process {self.pid} survives SIGKILL.", remedy="Look at `dmesg`.")
        if self._handle is not None:
            with contextlib.suppress(ChildProcessError):  # A child after all when this process once started it.
                os.waitid(os.P_PIDFD, self._handle, os.WEXITED | os.WNOHANG)
        return rung

    def close(self) -> None:
        """Let go of the handle, once."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def _send(self, signum: signal.Signals) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signum)
