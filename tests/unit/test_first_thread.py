"""A process whose first thread has ended: the kernel shows it as a zombie, and it lives."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge import guard

LEADERLESS = """
import ctypes, subprocess, sys, threading

child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
threading.Thread(target=sys.stdin.read).start()
print(child.pid, flush=True)
ctypes.CDLL(None).syscall(60, 0)  # exit(2): of this thread alone.
"""


@pytest.fixture
def leaderless():
    process = subprocess.Popen([sys.executable, "-c", LEADERLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout
        child = int(process.stdout.readline())
        deadline = time.monotonic() + 20
        while b") Z" not in Path(f"/proc/{process.pid}/stat").read_bytes():
            assert time.monotonic() < deadline, "its first thread has not ended"
        yield process.pid, child
        for pid in (child, process.pid):
            os.kill(pid, 9)


def test_it_counts_as_living(leaderless):
    assert guard.living(leaderless[0])


def test_its_children_are_still_found(leaderless):
    assert set(leaderless) <= set(guard.descendants(os.getpid()))


def test_a_real_zombie_does_not():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert guard.living(process.pid) is None
    process.wait()
