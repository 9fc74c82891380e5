"""tandem-train: reads the command line and the config, prints the plan, runs. Heavy imports come last."""

import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from bridge.errors import BridgeError, ConfigError
from trainer_env import arguments, config
from trainer_env.models.hub import without_statistics
from trainer_env.runs.finding import to_resume

if TYPE_CHECKING:
    from trainer_env.session import Session

EXIT_FAILED, EXIT_CONFIG, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run tandem-train; its exit status: 0 done, 1 failed, 2 wrong configuration, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    _keep_bytecode()
    without_statistics()
    signal.signal(signal.SIGTERM, _interrupt)
    if words and words[0] in arguments.COMMANDS:
        return reported(lambda: import_module(f"trainer_env.commands.{words[0]}").main(words[1:]))
    options = arguments.parse(words)
    return reported(lambda: _run(options))


def reported(work: Callable[[], int]) -> int:
    """The exit status of some work; what it raises is said in words."""
    try:
        return work()
    except ConfigError as error:
        print(f"tandem-train: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except BridgeError as error:
        print(f"tandem-train: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("tandem-train: interrupted; nothing is left running.", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(options: Namespace) -> int:
    settings = _settings(options)
    from trainer_env.ranks.launcher import launch
    from trainer_env.session import Session
    from trainer_env.session.opening import place

    source = str(options.config)
    placement = place(settings, source)
    session = Session(settings, placement, source=source, resume=bool(options.resume))
    for line in [*session.describe(), *placement.lines()]:
        print(line, flush=True)
    if options.check:
        print(f"engine     {session.check()}")
        if session.left_out:
            print(f"left out   {session.left_out}")
        return 0
    if placement.ranks > 1:
        return launch(session.config, placement, resume=bool(options.resume))
    return train(session)


def train(session: "Session") -> int:
    """A session's whole run; its exit status."""
    with session:
        signal.signal(signal.SIGINT, lambda *_: session.interrupt())
        signal.signal(signal.SIGTERM, lambda *_: session.interrupt())
        session.start()
        _log_to(session.config.run_dir / "trainer.log")
        summary = session.train()
    settings = session.config
    if summary.steps >= settings.grpo.max_steps or summary.stopped_early:
        return 0
    print(
        f"tandem-train: interrupted after step {summary.steps} of {settings.grpo.max_steps}; nothing is left running.\n"
        f"  do: {to_resume(settings.run_dir)} goes on from there.",
        file=sys.stderr,
    )
    return EXIT_INTERRUPTED


def _settings(options: Namespace) -> config.TrainConfig:
    """A new run's config, or the resumed run's own with this command line's changes."""
    settings = config.load(options.config, arguments.to_overrides(options))
    if options.resume:
        return msgspec.structs.replace(settings, run=options.resume, output_dir=str(options.config.parent.parent))
    return config.named(settings, options.config)


def _log_to(path: Path) -> None:
    """Messages of the libraries go to trainer.log: the terminal belongs to the progress display."""
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.captureWarnings(capture=True)


def _keep_bytecode() -> None:
    """Let Python keep what it compiles: without, importing the libraries takes three times as long, at each start.

    Containers often forbid it, for their images' sake; these environments are made on the spot.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
