"""What processes hold while they work, and a table of it: first, last and slope."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

KIB = 2**10


@dataclass(frozen=True)
class Sample:
    """What is held after some requests. None where the engine does not run.

    kib: resident memory of all processes together, which counts shared pages more than once. fds: open descriptors.
    """

    requests: int
    life: int
    server_kib: int
    server_fds: int
    engine_kib: int | None
    engine_fds: int | None
    shm_files: int
    """In the server's own /dev/shm/tandem-*."""
    spool_files: int
    """Of adapters, wherever the spool is."""


def resident(pid: int) -> int:
    """Bytes; 0 for a process that is gone."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).memory_info().rss
    return 0


def held(pids: Sequence[int]) -> tuple[int, int]:
    """Resident KiB and open descriptors of some processes together. Raises psutil.Error when one is gone."""
    family = [psutil.Process(pid) for pid in pids]
    return sum(q.memory_info().rss for q in family) // KIB, sum(q.num_fds() for q in family)


def table(samples: list[Sample], settled: list[Sample]) -> str:
    """For people. settled: those that count for tandem-server's growth."""
    rows = [("", "", "first", "last", "per 1000 requests")]
    rows += _rows("tandem-server", settled, "server")
    for life in sorted({s.life for s in samples}):
        rows += _rows(f"engine, life {life}", [s for s in samples if s.life == life], "engine")
    rows.append(_row("/dev/shm/tandem-*", "files", [(s.requests, s.shm_files) for s in samples]))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _rows(who: str, samples: list[Sample], part: str) -> list[tuple[str, ...]]:
    points = [(s.requests, getattr(s, f"{part}_kib"), getattr(s, f"{part}_fds")) for s in samples]
    memory = [(x, kib / KIB) for x, kib, _ in points if kib is not None]
    descriptors = [(x, fds) for x, _, fds in points if fds is not None]
    return [_row(who, "MiB", memory), _row("", "descriptors", descriptors)] if memory else []


def _row(who: str, what: str, points: Sequence[tuple[int, float]]) -> tuple[str, ...]:
    xs, ys = zip(*points, strict=True)
    slope = f"{1000 * statistics.linear_regression(xs, ys).slope:+.2f}" if len(set(xs)) > 1 else ""
    first, last = (f"{y:.1f}".removesuffix(".0") for y in (ys[0], ys[-1]))
    return who, what, first, last, slope
