"""One digest over all bytes, whatever they are in and however many cores computed it."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import digest as module
from bridge.digest import PIECE_BYTES, digest


def sha(data):
    return hashlib.sha256(data).digest()


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7])
def test_it_is_the_digest_of_the_pieces_digests(size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    pieces = [data[start : start + PIECE_BYTES] for start in range(0, size, PIECE_BYTES)]
    expected = hashlib.sha256(b"".join(map(sha, pieces))).hexdigest()
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data)) == expected


@given(data=st.binary(min_size=1, max_size=40), place=st.integers(0, 39), change=st.integers(1, 255))
def test_one_changed_byte_is_another_digest(data, place, change):
    other = bytearray(data)
    other[place % len(data)] ^= change
    assert digest(data) != digest(other)


FORKING = """
import os, signal
from bridge.digest import PIECE_BYTES, digest

data = bytes(4 * PIECE_BYTES)
before = digest(data)
if not (child := os.fork()):
    signal.alarm(60)
    os._exit(digest(data) != before)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_a_process_that_has_used_it_can_use_it_too():
    forking = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING], timeout=120, check=False)
    assert forking.returncode == 0


def test_pieces_that_change_places_are_another_digest(monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 4)
    assert digest(b"aaaabbbb") != digest(b"bbbbaaaa")
