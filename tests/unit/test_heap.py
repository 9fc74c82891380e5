"""tandem-server's memory for adapters: what was freed is there for the next one."""

import subprocess
import sys

import pytest

RECEIVES = """
import ctypes, resource, sys
from server_env.adapters.heap import keep_freed_memory

if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit(77)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
SIZE = 64 << 20

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory = libc.malloc(SIZE)
    ctypes.memset(memory, 1, SIZE)
    libc.free(memory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first = faults()
print(first, max(faults() for _ in range(3)))
"""


def faults(how: str) -> tuple[int, int]:
    done = subprocess.run([sys.executable, "-c", RECEIVES, how], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this C library is not glibc")
    assert done.returncode == 0, done.stderr
    first, later = map(int, done.stdout.split())
    return first, later


def test_the_second_adapter_arrives_in_the_memory_of_the_first():
    first, later = faults("kept")
    assert later < first / 20


def test_without_it_each_arrives_in_fresh_memory():
    first, later = faults("as it is")
    assert later > first / 2
