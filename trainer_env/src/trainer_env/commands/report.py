"""tandem-train report: one HTML page of one or more runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer_env.report import FILE, write_report
from trainer_env.runs.finding import add_output_dir, find_run

_DESCRIPTION = """\
Write one HTML page of one or more runs: their curves, samples, settings and versions. The page needs no network and
nothing beside it. Runs may still be going on, or have been interrupted; nothing of theirs is changed.
"""


def main(argv: Sequence[str]) -> int:
    """Write the page and say where it is. Raises ConfigError for a run that is not there, BridgeError for the disk."""
    options = _parser().parse_args(argv)
    out = write_report([find_run(name, options.output_dir) for name in options.runs], options.out)
    print(f"report     {out} ({out.stat().st_size / 2**20:.1f} MB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-train report", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's name, or the path of its folder; several are overlaid")
    add("--out", type=Path, metavar="FILE", help=f"the page (default: {FILE} in the first run's folder)")
    add_output_dir(parser)
    return parser
