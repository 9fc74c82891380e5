"""Folders that an engine keeps between runs (compiled kernels), one for each combination that must not be mixed."""

import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

MAX_SERVERS = 64
NOT_COMPILED = frozenset({"--seed", "--random-seed", "--gpu-memory-utilization", "--mem-fraction-static"})
"""Flags, each with a value, that compile nothing anew. The share of memory follows what happens to be free."""


class EngineCache:
    """A locked folder of one engine, version and command line. A second server of the same kind gets another."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def acquire(cls, engine: str, version: str, words: Sequence[str]) -> Self:
        """The first free folder for this engine. words: its command line, without what changes from start to start."""
        digest = hashlib.sha256("\0".join(_compiled_for(words)).encode()).hexdigest()[:16]
        parent = root() / "engines" / f"{engine}-{version or 'unknown'}"
        for index in range(MAX_SERVERS):
            path = parent / f"{digest}-{index}"
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return cls(path, lock)
        raise AssertionError(f"{MAX_SERVERS} servers of one kind run at once")

    def release(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)


def _compiled_for(words: Sequence[str]) -> list[str]:
    """The command line but for what compiles nothing anew."""
    return [word for before, word in zip(["", *words], words, strict=False) if not {before, word} & NOT_COMPILED]


def root() -> Path:
    """Where Tandem keeps what it may always make again."""
    return Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem")
