"""Are these flags the installed engine's? Asked of its own option list, which set-up wrote, not of a table here.

`<environment>/engine_options.json`: the engine's argument parser as data, one entry an option.
"""

import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bridge.errors import ConfigError
from bridge.settings import nearest

log = logging.getLogger(__name__)


class Option(msgspec.Struct, frozen=True):
    """One option of the engine's command line. negatable: `--no-…` exists as well."""

    flags: tuple[str, ...]
    dest: str = ""
    takes_value: bool = True
    choices: tuple[str | int | float | bool | None, ...] | None = None
    negatable: bool = False


class EngineOptions(msgspec.Struct, frozen=True):
    """Every option that one version of an engine has."""

    engine: str
    version: str
    options: tuple[Option, ...]

    def find(self, flag: str) -> Option | None:
        """The option that a flag belongs to; `-` and `_` are the same, `--a.b` sets a part of `--a`."""
        wanted = _plain(flag)
        for option in self.options:
            known = {_plain(name) for name in option.flags}
            if option.negatable:
                known |= {_plain("--no-" + name.removeprefix("--")) for name in option.flags if name.startswith("--")}
            if wanted in known:
                return option
        return None

    def check(self, arguments: Sequence[str], source: str) -> None:
        """Raise ConfigError for the first flag that the engine does not have, or a value that it does not take.

        source: where the flags come from, for the message.
        """
        for i, word in enumerate(arguments):
            if not _is_flag(word):
                continue
            flag, equals, value = word.partition("=")
            option = self.find(flag)
            if option is None:
                raise self._unknown(flag, source)
            if not equals and option.takes_value and i + 1 < len(arguments):
                value = arguments[i + 1]
            if option.takes_value and option.choices and value and value not in {str(c) for c in option.choices}:
                raise ConfigError(
                    f"{source}: {flag}: {self.engine} {self.version} does not take {value!r}.",
                    remedy=f"Expected one of: {', '.join(str(c) for c in option.choices)}.",
                )

    def _unknown(self, flag: str, source: str) -> ConfigError:
        names = [name for option in self.options for name in option.flags if name.startswith("--")]
        near = nearest(_plain(flag), names)
        return ConfigError(
            f"{source}: {flag}: {self.engine} {self.version} has no such option.",
            why="It may be spelled differently, or belong to another version of the engine.",
            remedy=f"The nearest option is {near}." if near else "See the engine's --help.",
        )


def installed(prefix: Path | None = None) -> EngineOptions | None:
    """The option list of the engine in this environment; None when set-up wrote none."""
    path = (prefix or Path(sys.prefix)) / "engine_options.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=EngineOptions)
    except FileNotFoundError:
        log.info("%s is missing: the engine's flags are not checked before it starts", path)
        return None


def flags_in(words: Iterable[str]) -> list[str]:
    """The flags among command-line words, without values."""
    return [word.partition("=")[0] for word in words if _is_flag(word)]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.removeprefix("-").replace(".", "", 1).isdecimal() and word != "-"


def _plain(flag: str) -> str:
    if not flag.startswith("--"):
        return flag
    return "--" + flag.removeprefix("--").partition(".")[0].replace("_", "-").lower()
