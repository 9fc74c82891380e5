"""Lines for the reader, from several threads, each whole."""

import sys


def say(*lines: str) -> None:
    """Print lines together, at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
