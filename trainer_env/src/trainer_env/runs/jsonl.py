"""A file of one JSON object a line, that is whole after any end of its writer."""

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from bridge.errors import BridgeError, ConfigError

T = TypeVar("T", bound=msgspec.Struct)

_encoder = msgspec.json.Encoder()


class JsonLines(Generic[T]):
    """Append-only records of one Struct type. A line that a killed writer left half-written is cut off on opening.

    Raises ConfigError for a file that holds something else, BridgeError when the disk refuses.
    """

    def __init__(self, path: Path, type_: type[T]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(type_)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        content = path.read_bytes()
        os.ftruncate(self._file, content.rfind(b"\n") + 1)

    def append(self, record: T) -> None:
        """Write one record. Either its whole line is in the file afterwards, or nothing of it."""
        line = _encoder.encode(record) + b"\n"
        end = os.fstat(self._file).st_size
        try:
            while line:
                line = line[os.write(self._file, line) :]
        except OSError as error:
            os.ftruncate(self._file, end)
            raise BridgeError(
                f"{self.path} cannot be written: {error.strerror}.",
                remedy="Make room, then go on from the last checkpoint with --resume; what was written is intact.",
            ) from error

    def read(self) -> list[T]:
        """All records, oldest first."""
        lines = self.path.read_bytes().splitlines()
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(self._decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ConfigError(
                    f"{self.path}:{number}: {error}.", remedy="Move the file away, or start a new run."
                ) from None
        return records

    def keep(self, records: list[T]) -> None:
        """Replace the file's content by these records, at once."""
        write_atomically(self.path, b"".join(_encoder.encode(record) + b"\n" for record in records))
        self.close()
        self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file. Nothing is buffered, so nothing is lost without it."""
        os.close(self._file)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file aside, then rename it into place: a reader sees the old content or the new. Raises BridgeError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise BridgeError(
            f"{path} cannot be written: {error.strerror}.", remedy="Make room on the disk, then try again."
        ) from error
