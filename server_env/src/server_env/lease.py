"""Which trainer holds the server: one run at a time, as long as its heartbeat comes; each new holder is an epoch."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from bridge import guard
from bridge.errors import Refused
from bridge.process import living_of

Clock = Callable[[], float]


@dataclass(frozen=True)
class Starter:
    """The trainer's process that has started this server. started: in the kernel's clock."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int | None) -> Self | None:
        """That process; None without a pid, or when it has ended."""
        process = guard.living(pid) if pid else None
        return cls(pid, process.started) if pid and process else None

    @property
    def lives(self) -> bool:
        """Whether it still runs."""
        return bool(living_of({self.pid: self.started}))


@dataclass
class LeaseBook:
    """lease_s: without a heartbeat for so long the holder is believed dead. only_run: the run admitted; empty: any."""

    lease_s: float
    only_run: str = ""
    clock: Clock = time.monotonic
    epoch: int = 0
    run_id: str = ""
    _client: str = ""
    _seen: float = field(default=float("-inf"))

    @property
    def alive(self) -> bool:
        """Whether a trainer holds the server."""
        return self.clock() - self._seen < self.lease_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat; infinite before the first."""
        return self.clock() - self._seen

    @property
    def died(self) -> bool:
        """Whether the last holder was a process of this host that is gone."""
        return _died_here(self._client)

    def attach(self, run_id: str, client: str, *, alone: bool = False, again: bool = False) -> bool:
        """Give run_id the lease; whether that began a new epoch. client: `host:pid`, for the error and for restarts.

        Processes of one run share its lease, unless one asks to have it alone; the one that holds it may ask again, for
        a new epoch. Raises Refused while another run holds
        it, or another process that is not to be shared with.
        """
        if self.only_run and run_id != self.only_run:
            raise Refused(
                f"This server belongs to run {self.only_run!r}, not {run_id!r}.",
                remedy="Start a server of your own, or use that run's name.",
            )
        fresh = not self.alive or self.died or (again and client == self._client)
        if self.alive and (run_id != self.run_id or (alone and not fresh)):
            raise Refused(
                f"Run {self.run_id!r} ({self._client}) holds this server.",
                why=f"It was heard from {self.silent_s:.1f} s ago; its lease ends after {self.lease_s:g} s of silence.",
                remedy="Wait until it has ended, or start a server of your own.",
            )
        if fresh:
            self.epoch += 1
            self._client = client
        self.run_id = run_id
        self._seen = self.clock()
        return fresh

    def beat(self, epoch: int) -> None:
        """A heartbeat. Raises Refused for an onlooker, and for a trainer that was replaced."""
        self.admit(epoch)
        if not epoch:
            raise Refused("Only a client that attached with a run_id keeps the lease.")
        self._seen = self.clock()

    def admit(self, epoch: int, *, changing: bool = False) -> None:
        """Raise Refused for a message of an older epoch, and, while somebody holds the server, for one of an onlooker
        (epoch 0) that is changing what it serves.
        """
        if changing and not epoch and self.alive:
            raise Refused(
                f"Run {self.run_id!r} ({self._client}) holds this server: an onlooker may ask it, and not change it.",
                remedy="Attach with that run's id once it has ended, or start a server of your own.",
            )
        if 0 < epoch < self.epoch:
            raise Refused(
                f"Run {self.run_id!r} has taken this server over (epoch {self.epoch}, yours is {epoch}).",
                why="No heartbeat of yours came for too long, so it was believed dead.",
                remedy="`--resume` continues your run on a server of its own.",
            )

    def end(self) -> None:
        """The holder goes: a heartbeat of its that is still under way is one of an older epoch."""
        self._seen = min(self._seen, self.clock() - self.lease_s)
        self.epoch += 1


def _died_here(client: str) -> bool:
    """Whether `host:pid` was a process of this host that is gone, or that only waits for its parent to notice."""
    host, _, pid = client.rpartition(":")
    return host == os.uname().nodename and pid.isdecimal() and guard.living(int(pid)) is None
