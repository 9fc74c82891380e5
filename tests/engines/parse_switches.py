"""Read command lines as an engine does: `python parse_switches.py ENGINE`, a JSON list a line in, a JSON dict out.

Runs in the engine's environment. The first line out is the engine's option list, as set-up writes it down.
"""

import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "environments"))

import engine_options


def main() -> None:
    """Answer until standard input closes."""
    warnings.simplefilter("ignore")
    out, sys.stdout = sys.stdout, sys.stderr
    engine = sys.argv[1]
    parser = engine_options.capture_parser(engine)
    print(
        json.dumps({"engine": engine, "version": "", "options": engine_options.describe(parser)}), file=out, flush=True
    )
    for line in sys.stdin:
        print(json.dumps(vars(parser.parse_args(json.loads(line))), default=str), file=out, flush=True)


if __name__ == "__main__":
    main()
