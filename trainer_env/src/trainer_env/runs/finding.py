"""A run, or a config, by what people call it: a run's name, its folder, a TOML file."""

import argparse
import shlex
from pathlib import Path

from bridge.errors import ConfigError
from bridge.settings import nearest

RUNS = Path("runs")
"""Where a name is looked for: what output_dir is unless a config says otherwise."""
CONFIG = "config.toml"


def add_output_dir(parser: argparse.ArgumentParser) -> None:
    """The option of every command that takes a run's name."""
    parser.add_argument(
        "--output-dir", type=Path, default=RUNS, metavar="DIR", help="where runs lie by their names (default: runs)"
    )


def find_run(name: str, runs: Path = RUNS) -> Path:
    """The folder of a run: a name stands for the one in `runs` where that was given. Raises ConfigError with the
    nearest name.
    """
    bare = Path(name).name == name
    for folder in (runs / name, Path(name)) if bare and runs != RUNS else (Path(name), runs / name):
        if (folder / CONFIG).is_file():
            return folder
    if Path(name).is_dir():
        raise ConfigError(f"{name} is no run's folder: it has no {CONFIG}.", remedy=_others(name, runs))
    raise ConfigError(f"There is no run {name!r}, here or in {runs}.", remedy=_others(name, runs))


def to_resume(run_dir: Path) -> str:
    """The words of a command line that go on with a run, for people."""
    where = [] if run_dir.parent == RUNS else ["--set", f"output_dir={run_dir.parent}"]
    return shlex.join(["--resume", run_dir.name, *where])


def taken(run_dir: Path) -> ConfigError:
    """What a new run is told whose folder holds one already."""
    return ConfigError(
        f"{run_dir} already holds a run.",
        remedy=f"Go on with it: {to_resume(run_dir)}; or start another one with --run NAME.",
    )


def find_config(name: str, runs: Path = RUNS) -> Path:
    """The TOML file that a name stands for. Raises ConfigError with the nearest name."""
    if is_config(name, runs):
        return Path(name) if Path(name).is_file() else find_run(name, runs) / CONFIG
    raise ConfigError(
        f"{name}: there is no such file, and no run of that name in {runs}.", remedy=_others(name, runs, "*.toml")
    )


def is_config(name: str, runs: Path = RUNS) -> bool:
    """Whether there is a config of that name."""
    return Path(name).is_file() or any((folder / CONFIG).is_file() for folder in (Path(name), runs / name))


def config_name(path: Path) -> str:
    """What to call a config in a table: a run by its name, a file by its path."""
    return path.parent.name if path.name == CONFIG and path.parent.name else str(path)


def _others(name: str, runs: Path, files: str = "") -> str:
    known = {folder.parent.name: folder.parent.name for folder in sorted(runs.glob(f"*/{CONFIG}"))}
    if files:
        known |= {path.name: str(path) for path in sorted(Path(name).parent.glob(files))}
    near = nearest(Path(name).name, list(known))
    return f"Did you mean {known[near]}?" if near else f"There are: {', '.join(known.values()) or 'none'}."
