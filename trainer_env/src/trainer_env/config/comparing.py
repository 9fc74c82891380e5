"""Configs shown and compared, setting by setting, with every default. Pure: text in, text out."""

from collections.abc import Mapping
from typing import Any

import msgspec

from bridge.toml_values import toml_value
from trainer_env.config import TrainConfig
from trainer_env.config.setting_words import OTHER_HALF
from trainer_env.config.toml_writer import write_toml

NO_DEFAULT = msgspec.UNSET
"""Of a setting that has to be set, or whose default is the server half's."""

_NAME = "run"
"""Differs between any two runs, and says nothing of what they did."""


class Setting(msgspec.Struct, frozen=True):
    """One value of a config, and what it would be if nothing were set."""

    value: Any
    default: Any = NO_DEFAULT

    @property
    def changed(self) -> bool:
        """Whether it differs from its default, or has none."""
        return not _alike(self, Setting(self.default))


def settings(config: TrainConfig) -> dict[str, Setting]:
    """Every setting by its dotted key; those of a list's tables by their number, as in --set."""
    return _of_section(config, "")


def _of_section(section: msgspec.Struct, at: str) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for field in msgspec.structs.fields(section):
        key, value = f"{at}{field.name}", getattr(section, field.name)
        default = field.default if field.default is not msgspec.NODEFAULT else NO_DEFAULT
        if isinstance(value, msgspec.Struct):
            found |= _of_section(value, f"{key}.")
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            for index, item in enumerate(value):
                found |= _of_section(item, f"{key}.{index}.")
        elif isinstance(value, Mapping):
            found |= _of_table(value, f"{key}.")
        else:
            found[key] = Setting(value, default)
    return found


def _of_table(table: Mapping[str, Any], at: str) -> dict[str, Setting]:
    """A table without settings of its own kind: what stands in it was put there."""
    found: dict[str, Setting] = {}
    for name, value in table.items():
        found |= _of_table(value, f"{at}{name}.") if isinstance(value, Mapping) else {f"{at}{name}": Setting(value)}
    return found


def show(config: TrainConfig, left_out: Mapping[str, str] | None = None) -> str:
    """The config as TOML with every default written out; a comment marks what differs from its default.

    left_out: what to say of settings of the server half that are not set, by their dotted keys; comments as well.
    """
    known, left_out = settings(config), left_out or {}
    data = msgspec.to_builtins(config)
    for key in left_out:
        table, _, name = key.partition(".")
        data[table].setdefault(name)
    return write_toml(data, lambda key: left_out.get(key) or _remark(key, known.get(key)))


def show_changed(config: TrainConfig) -> str:
    """As TOML, only what differs from its default."""
    known = settings(config)
    kept = _only(msgspec.to_builtins(config), {key for key, setting in known.items() if setting.changed}, "")
    return write_toml(kept, lambda key: _remark(key, known.get(key)))


def _only(data: Mapping[str, Any], keys: set[str], at: str) -> dict[str, Any]:
    """The part of plain data that holds these settings; tables that come to nothing are left out."""
    kept: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{at}{name}"
        if key in keys:
            kept[name] = value
        elif isinstance(value, Mapping):
            kept[name] = _only(value, keys, f"{key}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            kept[name] = [_only(item, keys, f"{key}.{index}.") for index, item in enumerate(value)]
    return {name: value for name, value in kept.items() if value != {}}


def _remark(key: str, setting: Setting | None) -> str:
    if setting is None:
        return ""
    if setting.value is None:
        return "is not set"
    if not setting.changed:
        return ""
    if setting.default is not NO_DEFAULT:
        return f"default: {toml_value(setting.default)}"
    return "set here" if key.partition(".")[0] in OTHER_HALF else ""


def compare(one: TrainConfig, other: TrainConfig, *, same: bool = False) -> list[tuple[str, str, str]]:
    """Settings that differ between two configs, as (key, the one's value, the other's) in TOML. A run's name is none.

    same: those that do not differ as well.
    """
    left, right = settings(one), settings(other)
    keys = [key for key in dict.fromkeys([*left, *right]) if key != _NAME]
    return [
        (key, _cell(left.get(key)), _cell(right.get(key)))
        for key in keys
        if same or not _alike(left.get(key), right.get(key))
    ]


def _alike(one: Setting | None, other: Setting | None) -> bool:
    """Whether two values mean the same: 32 and 32.0 do, 1 and true do not."""
    left, right = one.value if one else None, other.value if other else None
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _cell(setting: Setting | None) -> str:
    return "not set" if setting is None else toml_value(setting.value)


def table(rows: list[tuple[str, str, str]], names: tuple[str, str]) -> list[str]:
    """Rows of `compare` as lines of aligned columns, under a heading."""
    whole = [("key", *names), *rows]
    first, second = (max(len(row[column]) for row in whole) for column in (0, 1))
    return [f"{key:<{first}}  {one:<{second}}  {other}".rstrip() for key, one, other in whole]
