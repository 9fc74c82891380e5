"""Run as a program, in a folder of its own: a solution, then its tests in the same names, under hard limits.

argv: seconds of CPU and of the clock, bytes of memory, the pipe to answer on. stdin: JSON with a mark, and for each
step its source and whether it counts; it is read and let go of before the first step runs. For each test the mark and
1 or 0 are answered. What the solution does to this process (leaving it, closing the pipe) costs it the tests that are
left.
"""

import json
import os
import resource
import signal
import sys
import types

MAX_FILE_BYTES = 10 * 2**20
MAX_OPEN_FILES = 64


def limit(seconds: float, memory_bytes: int) -> None:
    """Bound CPU time, memory, files and processes of this process and its children, and the time that it may take."""
    whole = int(seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, whole),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))
    # Should whoever started this be gone, nobody else would end a solution that sleeps.
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)


def main() -> None:
    """Answer the job."""
    seconds, memory_bytes, answers = sys.argv[1:]
    job = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    sys.argv[1:] = []
    limit(float(seconds), int(memory_bytes))
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for source, counts in job["steps"]:
        try:
            code = compile(source.encode(errors="surrogatepass"), "solution.py", "exec", dont_inherit=True)
            exec(code, module.__dict__)  # noqa: S102 (it is what this program is for)
            passed = True
        except BaseException:  # noqa: BLE001 (SystemExit and KeyboardInterrupt as well: the next test is still due)
            passed = False
        if counts:
            os.write(int(answers), f"{job['mark']}{int(passed)}\n".encode())


if __name__ == "__main__":
    main()
    os._exit(0)
