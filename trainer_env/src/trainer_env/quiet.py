"""What libraries print goes to a file: the terminal belongs to the progress display."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path


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


@contextmanager
def prints_to(path: Path) -> Iterator[None]:
    """Send sys.stdout and sys.stderr to a file."""
    stream = LogFile(path)
    with redirect_stdout(stream), redirect_stderr(stream):
        yield
