"""One process of a trainer on several GPUs: started by `launcher.py`, with FOLDER and PARENT."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bridge import guard
from trainer_env import config, ranks
from trainer_env.cli import reported, train
from trainer_env.placement import Placement
from trainer_env.ranks.follower import Follower
from trainer_env.session import Session


def main(argv: Sequence[str] | None = None) -> int:
    """Do this process's part; its exit status, as that of tandem-train."""
    parser = argparse.ArgumentParser(prog="tandem-train")
    parser.add_argument("folder", type=Path, help="with config.toml and placement.json")
    parser.add_argument("parent", type=int, help="the launcher's pid")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(argv)
    guard.end_with_parent(options.parent, signal.SIGTERM)
    return reported(lambda: _run(options.folder, resume=options.resume))


def _run(folder: Path, *, resume: bool) -> int:
    settings = config.load(folder / "config.toml")
    placement = msgspec.json.decode((folder / "placement.json").read_bytes(), type=Placement)
    if ranks.rank() == 0:
        return train(Session(settings, placement, resume=resume))
    follower = Follower(settings, placement, resume=resume)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: follower.stop.set())
    follower.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
