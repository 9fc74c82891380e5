"""What each setting means, in words: read from where it is explained, the sections' fields and configs/demo.toml."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from bridge import setting_words
from bridge.errors import ConfigError
from bridge.setting_words import Words
from bridge.settings import nearest
from trainer_env.config import TrainConfig

OTHER_HALF = ("server", "vllm", "sglang")
"""Tables of the server half: it knows their settings and their defaults, not the trainer."""

_SETTING = re.compile(r"^(?:# )?(?P<key>[A-Za-z_]\w*) = (?P<rest>.*)$")
_TABLE = re.compile(r"^\[{1,2}(?P<name>[\w.]+)\]{1,2}")
_VALUE = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#])*""")


def known_keys() -> list[str]:
    """Every setting of the trainer half by its dotted key, without the numbers of lists; sections too."""
    return setting_words.keys(TrainConfig)


def is_known(key: str) -> bool:
    """Whether `words` knows a setting or a section of that name; numbers of lists may be in it."""
    return setting_words.plain(key) in known_keys()


def words(key: str, demo: Path | None = None) -> Words:
    """What a setting is, takes and means. demo: a TOML file with comments to learn from. Raises ConfigError."""
    if not is_known(key):
        raise no_such_setting(key, known_keys())
    return with_comments(setting_words.words(TrainConfig, key), demo)


def with_comments(told: Words, demo: Path | None) -> Words:
    """The words with what a TOML file's comments add to them."""
    comments = demo_comments(demo.read_text(encoding="utf-8")) if demo and demo.is_file() else {}
    comment = comments.get(setting_words.plain(told.key), "")
    meaning = tuple(said for said in told.meaning if _bare(said) not in _bare(comment))
    return msgspec.structs.replace(told, meaning=(*meaning, comment) if comment else told.meaning)


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def demo_comments(text: str) -> dict[str, str]:
    """What the comments of a TOML file say of its settings, by dotted key: behind a setting, under it, or above it.

    A setting in a comment (`# max_staleness = 0`) is explained the same way.
    """
    found: dict[str, str] = {}
    table, last, above = "", "", list[str]()
    for line in text.splitlines():
        if heading := _TABLE.match(line):
            table, last, above = f"{heading['name']}.", "", []
        elif setting := _SETTING.match(line):
            last = f"{table}{setting['key']}"
            value = _VALUE.match(setting["rest"])
            behind = setting["rest"][value.end() if value else 0 :].lstrip("# ")
            found[last] = " ".join([*above, behind] if behind else above)
            above = []
        elif line.startswith("# "):
            above.append(line.removeprefix("# "))
        elif line.lstrip().startswith("# ") and last:
            found[last] = f"{found[last]} {line.lstrip().removeprefix('# ')}"
        else:
            above = []
    return {key: said for key, said in found.items() if said}


def no_such_setting(key: str, known: Iterable[str]) -> ConfigError:
    """The refusal of a key that is none of the known ones, with the nearest of them."""
    names = list(known)
    by_last = {name.rpartition(".")[2]: name for name in names}
    near = nearest(key, names) or by_last.get(nearest(key.rpartition(".")[2], list(by_last)), "")
    return ConfigError(
        f"There is no setting {key!r}.",
        remedy=f"Did you mean {near}?" if near else f"The sections are {', '.join(TrainConfig.__struct_fields__)}.",
    )
