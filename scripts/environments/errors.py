"""The one error of this package: what happened, why, where the log is, what to do."""

from pathlib import Path


class SetupError(Exception):
    """Something that the reader can put right.

    Printed on one line, so that it is found at the end of a long CI log.
    """

    def __init__(self, what: str, *, why: str, remedy: str, log: Path | None = None) -> None:
        super().__init__(what, why, remedy, log)
        self.what = what
        self.why = why
        self.remedy = remedy
        self.log = log

    def __str__(self) -> str:
        log = f" Log: {self.log}." if self.log else ""
        return f"{self.what}: {self.why.rstrip('.')}.{log} Do: {self.remedy}"


class Interrupted(SetupError):
    """A signal asked this process to stop."""

    def __init__(self) -> None:
        super().__init__("interrupted", why="a signal asked for it", remedy="run the command again to go on")
