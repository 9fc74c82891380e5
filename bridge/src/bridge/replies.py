"""Answers by request id: one question is answered once, however often it is asked."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from bridge.errors import Refused

ENTRY_BYTES = 256
"""What an entry costs besides its answer, so that many tiny answers count as well."""


@dataclass(slots=True)
class _Entry:
    digest: bytes
    reply: bytes | None = None


class ReplyStore:
    """Which requests run and which are answered. Answers stay until acknowledged, or until budget_bytes are exceeded:
    then the oldest goes first (its client, should it ever ask again, gets a new answer).
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def begin(self, request_id: bytes, header: bytes, buffer_bytes: int = 0) -> bool:
        """True when this request is new and must be worked on. Raises Refused for a known id with other content.

        Of a buffer only the size is compared: its header has the digest, and hashing it would hold up the event loop.
        """
        digest = hashlib.blake2b(header, digest_size=16, salt=buffer_bytes.to_bytes(16, "big")).digest()
        entry = self._entries.get(request_id)
        if entry is None:
            self._entries[request_id] = _Entry(digest)
            return True
        if entry.digest != digest:
            raise Refused("This request id was used before, for another request.")
        return False

    def stored(self, request_id: bytes) -> bytes | None:
        """The answer to a request, when there is one already."""
        entry = self._entries.get(request_id)
        return entry.reply if entry else None

    def finish(self, request_id: bytes, reply: bytes) -> None:
        """Keep an answer until it is acknowledged."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.reply = reply
        self.held_bytes += ENTRY_BYTES + len(reply)
        self._entries.move_to_end(request_id)
        while self.held_bytes > self._budget:
            oldest = next((key for key, held in self._entries.items() if held.reply is not None), None)
            assert oldest is not None
            self.forget(oldest)

    def forget(self, request_id: bytes) -> None:
        """Drop a request and its answer; unknown ids are fine."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.reply is not None:
            self.held_bytes -= ENTRY_BYTES + len(entry.reply)
            del self._entries[request_id]

    def abandon(self, request_id: bytes) -> None:
        """Drop a request that gets no lasting answer (it was `Busy`, or its client cancelled it)."""
        self.forget(request_id)
        self._entries.pop(request_id, None)
