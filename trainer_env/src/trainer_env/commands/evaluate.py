"""tandem-train evaluate: a run's held-out examples, answered with its adapter and without."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge.errors import ConfigError
from trainer_env import config
from trainer_env.evaluation import Answered, best_adapter
from trainer_env.runs.finding import CONFIG, add_output_dir, find_run
from trainer_env.session.completing import Version

VERSIONS = ("base", "best", "last")


def main(argv: Sequence[str]) -> int:
    """Its exit status. Raises ConfigError, and what a Session raises."""
    options = _parser().parse_args(argv)
    run_dir = find_run(options.run, options.output_dir).resolve()
    wanted = {*(["base"] if options.base else []), *(options.version or ["last"])}
    # In this order, for a server takes adapters in the order of their steps.
    versions: dict[str, Version] = {name: _version(name, run_dir) for name in VERSIONS if name in wanted}
    asked = {"evaluation.num_generations": options.n, "evaluation.temperature": options.temperature}
    # Read here as well: what does not go together is refused before a server is started.
    config.load(run_dir / CONFIG, [f"{key}={it}" for key, it in asked.items() if it is not None])
    from trainer_env.session import Session

    quiet = ['tracking.display="none"'] if options.json else []
    with Session.attach(str(run_dir), *quiet) as session:
        found = {
            name: session.evaluate(
                version=version, n=options.n, temperature=options.temperature, max_examples=options.max_examples
            )
            for name, version in versions.items()
        }
    if options.json:
        print(json.dumps([_row(name, answered) for name, answered in found.items()], indent=2))
    else:
        _show(found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-train evaluate",
        description="Answer a run's held-out examples with an adapter of it, and score the answers with its rewards.",
        epilog="example: evaluate adding --base --n 8 --temperature 1   compares the last adapter with the base model",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="the run's name, or its folder")
    add("--base", action="store_true", help="the base model as well: short for --version base beside the others")
    add(
        "--version",
        action="append",
        choices=VERSIONS,
        help="whose answers: of the best evaluation, of the last step (default), of the base model; may be repeated",
    )
    add("--n", type=_count, metavar="N", help="answers to each example (default: evaluation.num_generations)")
    add("--temperature", type=_temperature, metavar="T", help="of sampling (default: evaluation.temperature)")
    add("--max-examples", type=_count, metavar="N", help="only the first N held-out examples")
    add("--json", action="store_true", help="print the figures as JSON")
    add_output_dir(parser)
    return parser


def _version(name: str, run_dir: Path) -> Version:
    """As Session.evaluate takes it. Raises ConfigError when the run has kept no best adapter."""
    if name == "best":
        best = best_adapter.read(run_dir)
        if best is None:
            raise ConfigError(
                f"{run_dir.name} has no best adapter.",
                why="One is kept of a run with evaluations in between: evaluation.every and evaluation.keep_best.",
                remedy="Ask for --version last.",
            )
        return best.version
    return "base" if name == "base" else "latest"


def _row(name: str, answered: Answered) -> dict[str, object]:
    return {
        "version": name,
        "reward_mean": answered.reward_mean,
        "pass_at": answered.pass_at,
        "examples": answered.examples,
        "num_generations": answered.num_generations,
        "temperature": answered.temperature,
    }


def _show(found: dict[str, Answered]) -> None:
    """A table with a row for each version."""
    from rich.console import Console
    from rich.table import Table

    some = next(iter(found.values()))
    each = "1 answer" if some.num_generations == 1 else f"{some.num_generations} answers"
    print(f"{some.examples} held-out examples, {each} each at temperature {some.temperature:g}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    chances = [f"pass@{k}" for k in some.pass_at]
    for column in ("version", "reward", *chances):
        table.add_column(column, justify="left" if column == "version" else "right")
    for name, answered in found.items():
        figures = [answered.reward_mean, *answered.pass_at.values()]
        table.add_row(name, *(f"{figure:.3f}" for figure in figures))
    Console(file=sys.stdout, highlight=False).print(table)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value
