"""tandem-train report: one HTML page of one or more runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bridge.errors import ConfigError
from trainer_env.jsonl import write_atomically
from trainer_env.report import page
from trainer_env.run_reader import find_run, read_run

FILE = "report.html"

_DESCRIPTION = """\
Write one HTML page of one or more runs: their curves, samples, settings and versions. The page needs no network and
nothing beside it. Runs may still be going on, or have been interrupted; nothing of theirs is changed.
"""


def main(argv: Sequence[str]) -> int:
    """Write the page and say where it is. Raises ConfigError for a run that is not there, BridgeError for the disk."""
    options = _parser().parse_args(argv)
    # By its path, so that a run that is named twice is shown once.
    folders = list(
        {folder.resolve(): folder for name in options.runs for folder in [find_run(name, options.output_dir)]}
    )
    out = options.out or folders[0] / FILE
    if out.is_dir():
        out = out / FILE
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}.", remedy="Make it first.")
    write_atomically(out, page([read_run(folder) for folder in folders]))
    print(f"report     {out} ({out.stat().st_size / 2**20:.1f} MB)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-train report", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="a run's name, or the path of its folder; several are overlaid")
    add("--out", type=Path, metavar="FILE", help=f"the page (default: {FILE} in the first run's folder)")
    add(
        "--output-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where runs lie by their names (default: runs)",
    )
    return parser
