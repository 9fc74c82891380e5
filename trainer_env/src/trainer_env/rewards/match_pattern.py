"""Run as a program: searches texts for a pattern, each under a time limit that the kernel keeps.

While Python's `re` backtracks, no other thread runs and no signal handler is called; the kernel can end a process.
stdin: JSON with pattern, whole, seconds, texts. stdout: for each text a line, 1 or 0; SIGALRM ends it on the text that
takes too long.
"""

import json
import re
import signal
import sys


def main() -> None:
    """Answer stdin."""
    job = json.load(sys.stdin)
    pattern = re.compile(job["pattern"], re.DOTALL)
    found = pattern.fullmatch if job["whole"] else pattern.search
    for text in job["texts"]:
        signal.setitimer(signal.ITIMER_REAL, job["seconds"])
        print(int(found(text) is not None), flush=True)


if __name__ == "__main__":
    main()
