"""Plain data as TOML. The standard library only reads it."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Remark = Callable[[str], str]
"""What to say of a setting, by its dotted key; nothing: an empty string."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def write_toml(data: Mapping[str, Any], remark: Remark | None = None) -> str:
    """TOML text of strings, numbers, booleans, lists and tables. A None is left out: TOML has no word for it.

    remark: what stands in a comment behind a setting; where a None is remarked upon, that comment is all there is.
    """
    return "\n".join(_table(data, (), "", remark or (lambda _: ""))).strip() + "\n"


def _table(data: Mapping[str, Any], path: tuple[str, ...], at: str, remark: Remark) -> Iterator[str]:
    """A table's own values first: a line below a sub-table's heading would belong to that one.

    at: the dotted key of the table, tables of a list by their number.
    """
    for key, value in data.items():
        if isinstance(value, Mapping) or _is_tables(value):
            continue
        said = remark(f"{at}{key}")
        if value is not None:
            yield f"{_key(key)} = {_value(value)}" + (f"  # {said}" if said else "")
        elif said:
            yield f"# {_key(key)} {said}"
    for key, value in data.items():
        name = (*path, _key(key))
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(name)}]"
            yield from _table(value, name, f"{at}{key}.", remark)
        elif _is_tables(value):
            for index, item in enumerate(value):
                yield f"\n[[{'.'.join(name)}]]"
                yield from _table(item, name, f"{at}{key}.{index}.", remark)


def toml_value(value: Any) -> str:
    """A value as it is written in TOML; an unset one in words."""
    return "not set" if value is None else _value(value)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Mapping():
            inner = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{{', '.join(inner)}}}"
    raise TypeError(f"TOML cannot hold {value!r}")


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key)


def _string(text: str) -> str:
    # JSON's string is TOML's basic string, but for DEL, and for surrogate pairs beyond the basic plane.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
