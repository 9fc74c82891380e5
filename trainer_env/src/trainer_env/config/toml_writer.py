"""Plain data as TOML. The standard library only reads it."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.toml_values import toml_key, toml_value

Remark = Callable[[str], str]
"""What to say of a setting, by its dotted key; nothing: an empty string."""


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
            yield f"{toml_key(key)} = {toml_value(value)}" + (f"  # {said}" if said else "")
        elif said:
            yield f"# {toml_key(key)} {said}"
    for key, value in data.items():
        name = (*path, toml_key(key))
        if isinstance(value, Mapping):
            yield f"\n[{'.'.join(name)}]"
            yield from _table(value, name, f"{at}{key}.", remark)
        elif _is_tables(value):
            for index, item in enumerate(value):
                yield f"\n[[{'.'.join(name)}]]"
                yield from _table(item, name, f"{at}{key}.{index}.", remark)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)
