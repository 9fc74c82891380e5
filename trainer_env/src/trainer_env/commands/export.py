"""tandem-train export: a run's adapter, or the whole model with it, as a folder that others can use."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from trainer_env.exporting import What, export
from trainer_env.runs.finding import add_output_dir, find_run

_EPILOG = """\
examples:
  export adding --out adding-lora                    the adapter, in PEFT's format, with the tokenizer
  export adding --out adding-8 --which 8             that of checkpoint 8
  export adding --out adding-model --what merged     the whole model in 16 bit, the adapter in its weights
"""


def main(argv: Sequence[str]) -> int:
    """The exit status: 0."""
    options = _parser().parse_args(argv)
    run = find_run(options.run, options.output_dir)
    done = export(run, options.out, what=options.what, which=options.which, force=options.force)
    kind = "adapter" if options.what == "adapter" else "merged model"
    print(f"{kind:<13}{done.folder}\n{'from':<13}{done.origin.describe()}")
    for note in done.notes:
        print(f"{'note':<13}{note}")
    for backend, command in done.commands.items():
        print(f"\nserve it with {backend}:\n  {command}\nand ask for the model {done.asked[backend]}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-train export",
        description="Write what a run made into a folder of its own, and say how to serve it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where to: a folder that is new or empty")
    add("--what", choices=get_args(What), default="adapter", help="adapter (default), or merged: the whole model")
    add("--which", default="last", metavar="last|best|STEP", help="of which step; STEP is a checkpoint (default: last)")
    add("--force", action="store_true", help="replace what an earlier export wrote there, and nothing else")
    add_output_dir(parser)
    return parser
