"""What libraries print goes to a file: the terminal belongs to the progress display."""

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO, cast


class LogFile(io.TextIOBase):
    """A text stream that opens its file for each write.

    Loggers keep the stream that was sys.stderr when they were made, and print to it long after that phase has ended.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Append to the file; where its folder is gone there is nobody to read it."""
        if self._path.parent.is_dir():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        return len(text)


class OneThreads(io.TextIOBase):
    """What one thread prints goes to a file, and what others do to where it went before."""

    def __init__(self, file: TextIO, before: TextIO) -> None:
        self._file = file
        self._before = before
        self._thread = threading.get_ident()

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """To where this thread's words go."""
        return (self._file if threading.get_ident() == self._thread else self._before).write(text)

    def flush(self) -> None:
        """Both of them."""
        self._file.flush()
        self._before.flush()


@contextmanager
def prints_to(path: Path) -> Iterator[None]:
    """Send sys.stdout and sys.stderr to a file. In a thread beside the main one: only what that thread prints."""
    file = cast("TextIO", LogFile(path))
    out, err = file, file
    if threading.current_thread() is not threading.main_thread():
        out, err = cast("TextIO", OneThreads(file, sys.stdout)), cast("TextIO", OneThreads(file, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        yield
