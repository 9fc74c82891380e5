"""tandem-train config: show, check or compare configurations. Starts nothing."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from bridge.errors import ConfigError
from bridge.setting_words import Words
from bridge.toml_values import toml_value
from trainer_env import arguments, config
from trainer_env.cli import EXIT_CONFIG
from trainer_env.commands.config_check import check
from trainer_env.config import comparing
from trainer_env.config.setting_words import OTHER_HALF, is_known, known_keys, words
from trainer_env.runs.finding import add_output_dir, config_name, find_config, is_config

_EPILOG = """\
examples:
  config show                                    the demo, with every default written out
  config show my.toml --changed                  only what differs from the defaults
  config show grpo.learning_rate                 what a setting means, takes, and is
  config show adding grpo.learning_rate          the same, with its value in runs/adding
  config show server                             all of a section; of the server half's as well
  config check my.toml configs/*.toml --load     is all well? reads data and rewards too
  config diff adding my.toml                     what is different between a run and a file
"""
EXIT_DIFFERENT = 1


def main(argv: Sequence[str]) -> int:
    """The exit status: 0; for `check` 2 when something is wrong, for `diff` 1 when the configs differ."""
    options = _parser().parse_args(argv)
    return options.work(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem-train config",
        description="Show, check or compare configurations. A config is a TOML file, a run's folder, or a run's name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    jobs = parser.add_subparsers(required=True, metavar="show|check|diff")

    show = jobs.add_parser("show", help="a config with every default, or what one setting means")
    show.add_argument("what", nargs="*", metavar="CONFIG|KEY", help="a config (default: the demo), a setting, or both")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    show.set_defaults(work=_show)

    checked = jobs.add_parser("check", help="everything that is wrong with a config")
    checked.add_argument("configs", nargs="+", metavar="CONFIG")
    checked.add_argument(
        "--load", action="store_true", help="read the data (and how long prompts are) and the reward functions"
    )
    checked.set_defaults(work=_check)
    for job in (show, checked):
        job.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as if the config said so")

    diff = jobs.add_parser("diff", help="the settings that differ between two configs")
    diff.add_argument("configs", nargs=2, metavar="CONFIG")
    diff.add_argument("--all", action="store_true", help="the settings that are the same as well")
    diff.set_defaults(work=_diff)
    for job in (show, checked, diff):
        add_output_dir(job)
    return parser


def _show(options: argparse.Namespace) -> int:
    name, key = _config_and_key(options.what, options.output_dir)
    path = find_config(name, options.output_dir) if name else arguments.demo()
    loaded = config.load(path, options.set)
    if key:
        _explain(key, loaded, path)
    elif options.changed:
        print(comparing.show_changed(loaded), end="")
    else:
        _show_all(loaded)
    return 0


def _show_all(loaded: config.TrainConfig) -> None:
    """The config with the defaults of both halves, as far as the server half can be asked for its own."""
    from trainer_env.commands import config_server  # With all that it takes to ask the server half.

    try:
        print(comparing.show(loaded, config_server.remarks(loaded)), end="")
    except ConfigError as error:
        print(comparing.show(loaded), end="")
        print(f"# The defaults of {', '.join(OTHER_HALF)} are not known here: {error.what} ({error.remedy})")


def _config_and_key(what: Sequence[str], runs: Path) -> tuple[str, str]:
    """Which word names a config and which a setting; empty: not given."""
    match what:
        case []:
            return "", ""
        case [name] if is_config(name, runs):
            return name, ""
        case [name] if name.endswith(".toml") or "/" in name:
            return name, ""  # There is none: that is said when it is looked for.
        case [key]:
            head = key.partition(".")[0]
            if head in known_keys() or "." in key:
                return "", key
            raise ConfigError(
                f"{key!r} is neither a setting nor a config: no such file, no such run in {runs}.",
                remedy="A setting has its section before it, as in grpo.learning_rate.",
            )
        case [name, key]:
            return name, key
    raise ConfigError("config show takes a config, a setting, or a config and a setting.")


def _explain(key: str, loaded: config.TrainConfig, path: Path) -> None:
    if key.partition(".")[0] in OTHER_HALF:
        from trainer_env.commands import config_server

        lines, told = config_server.explain(key, loaded, config_name(path), arguments.demo())
        print("\n".join(lines))
        if told:
            _print_words(key, told, its_own=told.key == key and key not in OTHER_HALF)
        return
    values = comparing.settings(loaded)
    below = {name: setting for name, setting in values.items() if name == key or name.startswith(f"{key}.")}
    known = key
    while below and not is_known(known):
        known = known.rpartition(".")[0]  # What stands in a free table, such as a reward's args, is the table's.
    for name, setting in below.items():
        print(f"{name} = {toml_value(setting.value)}  ({config_name(path)})")
    _print_words(key, words(known, arguments.demo()), its_own=key in values)


def _print_words(key: str, told: Words, *, its_own: bool) -> None:
    """What is said of a key. told: its words, or those of the table that it stands in. its_own: it has a value."""
    rows = [("default", told.default or "none: it has to be set"), ("takes", told.takes)] if its_own else []
    rows += [("in", told.key)] if told.key != key else []
    rows += [("means", " — ".join(told.meaning))] if told.meaning else []
    rows += [("section", told.section)]
    for name, text in rows:
        print(textwrap.fill(text, 118, initial_indent=f"{name:<9}", subsequent_indent=" " * 9))


def _check(options: argparse.Namespace) -> int:
    good = True
    for name in options.configs:
        try:
            path = find_config(name, options.output_dir)
        except ConfigError as error:
            print(error)
            good = False
            continue
        verdict = check(path, options.set, load=options.load)
        good = good and verdict.good
        for line in verdict.lines():
            print(line, flush=True)
    return 0 if good else EXIT_CONFIG


def _diff(options: argparse.Namespace) -> int:
    paths = [find_config(name, options.output_dir) for name in options.configs]
    one, other = (config.load(path) for path in paths)
    different = comparing.compare(one, other)
    rows = comparing.compare(one, other, same=True) if options.all else different
    if rows:
        for line in comparing.table(rows, (config_name(paths[0]), config_name(paths[1]))):
            print(line)
    return EXIT_DIFFERENT if different else 0
