"""The error tree. Every error crosses the wire with its cause, the log that shows it, and the remedy."""

import msgspec


class Failure(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """An error on the wire: server → client, in place of the reply that was asked for."""

    code: str
    what: str
    why: str = ""
    log_path: str = ""
    log_tail: str = ""
    remedy: str = ""


class BridgeError(Exception):
    """Base of all errors that Tandem raises on purpose.

    what: what happened, one sentence. why: the likely cause. log_path: the log that shows it. log_tail: its last lines.
    remedy: what the reader can do.
    """

    code = "error"

    def __init__(self, what: str, *, why: str = "", log_path: str = "", log_tail: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.log_path = log_path
        self.log_tail = log_tail
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"why: {self.why}")
        if self.log_tail:
            parts.append("last log lines:\n" + self.log_tail.rstrip())
        if self.log_path:
            parts.append(f"log: {self.log_path}")
        if self.remedy:
            parts.append(f"do: {self.remedy}")
        return "\n  ".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return (from_failure, (to_failure(self),))


class Timeout(BridgeError, TimeoutError):
    """A deadline passed."""

    code = "timeout"


class PeerDied(BridgeError, ConnectionError):
    """The other side's process is gone, or no longer answers."""

    code = "peer-died"


class ProtocolMismatch(BridgeError):
    """The two sides speak different protocol versions, or a message is not of the protocol."""

    code = "protocol-mismatch"


class Refused(BridgeError, ValueError):
    """The request itself is wrong, and would be wrong again."""

    code = "refused"


class Busy(BridgeError):
    """A queue is full; the same request can succeed later. The client waits and asks again by itself."""

    code = "busy"


class StaleVersion(Refused):
    """An adapter version is out of order, already retired, or will never be served."""

    code = "stale-version"


class SyncMismatch(BridgeError):
    """The server does not serve what was trained."""

    code = "sync-mismatch"


class EngineFailed(BridgeError, RuntimeError):
    """The engine died or refuses to start; its last log lines are attached."""

    code = "engine-failed"


class ConfigError(BridgeError, ValueError):
    """A configuration file, flag or environment is wrong; nothing was started."""

    code = "config"


_BY_CODE: dict[str, type[BridgeError]] = {
    cls.code: cls
    for cls in (
        BridgeError,
        Timeout,
        PeerDied,
        ProtocolMismatch,
        Refused,
        Busy,
        StaleVersion,
        SyncMismatch,
        EngineFailed,
        ConfigError,
    )
}


def to_failure(error: BridgeError) -> Failure:
    """The wire form of an error. What is no valid text (a file name can be anything) is escaped."""
    parts = (error.what, error.why, error.log_path, error.log_tail, error.remedy)
    return Failure(error.code, *(part.encode(errors="backslashreplace").decode() for part in parts))


def from_failure(failure: Failure) -> BridgeError:
    """The error that a `Failure` stands for; an unknown code becomes a plain `BridgeError`."""
    cls = _BY_CODE.get(failure.code, BridgeError)
    return cls(
        failure.what,
        why=failure.why,
        log_path=failure.log_path,
        log_tail=failure.log_tail,
        remedy=failure.remedy,
    )
