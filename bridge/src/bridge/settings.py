"""Strict configuration: TOML to msgspec Structs. Every error has the key, what was expected and the nearest name."""

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bridge.errors import ConfigError

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


def decode_toml(path: Path, type_: type[T], overrides: Sequence[str] = ()) -> T:
    """Read a TOML file as type_, with `key=value` overrides applied. Raises ConfigError."""
    return decode_dict(apply_overrides(read_toml(path), overrides), type_, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as plain data. Raises ConfigError when it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], n=1)
        raise ConfigError(
            f"{path}: there is no such file.",
            remedy=f"Did you mean {path.parent / near[0]}?" if near else "Check the path given to --config.",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from None


def decode_dict(data: dict[str, Any], type_: type[T], source: str) -> T:
    """Check plain data against type_. source: what to call the data in errors. Raises ConfigError."""
    try:
        return msgspec.convert(data, type_, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, type_, source) from None


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of data with `a.b=value` set. Values are TOML; a bare word is a string. `a.0.b` reaches a list."""
    result = _copy(data)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"--set {override}: expected key=value.", remedy="For example --set grpo.learning_rate=1e-4."
            )
        _set(result, key.strip(), _value(text.strip()), override)
    return result


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name most like name, or an empty string."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), "")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(data: dict[str, Any], key: str, value: Any, override: str) -> None:
    *parents, last = key.split(".")
    place: Any = data
    for part in parents:
        place = place[_index(place, part, override)] if isinstance(place, list) else place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"--set {override}: {part} is a value, not a section.")
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    else:
        place[last] = value


def _index(place: list[Any], part: str, override: str) -> int:
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(f"--set {override}: expected a number below {len(place)} in place of {part!r}.")
    return int(part)


def _copy(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(value) for value in data] if isinstance(data, list) else data


def _explain(message: str, data: Any, type_: Any, source: str) -> ConfigError:
    matched = _AT.match(message)
    assert matched
    what, path = matched["what"], (matched["path"] or "$").removeprefix("$").removeprefix(".")
    steps = re.findall(r"[^.\[\]]+", path)
    owner, found = _descend(type_, data, steps)
    if unknown := _UNKNOWN.match(what):
        return _unknown(unknown["name"], path, _fields(owner), source)
    if missing := _MISSING.match(what):
        return ConfigError(f"{source}: {_dotted(path, missing['name'])}: is missing, and has no default.")
    expected = what[:1].lower() + what[1:].replace("`", "") if what.startswith("Expected") else what
    if ", got" not in expected and not isinstance(found, dict | list) and steps:
        expected += f", got {found!r}"
    elif ", got" in expected and not isinstance(found, dict | list):
        expected += f" ({found!r})"
    hint = nearest(found, _choices(owner)) if isinstance(found, str) else ""
    return ConfigError(
        f"{source}: {path or 'the file'}: {expected}.",
        remedy=f"The nearest valid value is {hint!r}." if hint else _listed(_choices(owner)),
    )


def _unknown(name: str, path: str, fields: Sequence[str], source: str) -> ConfigError:
    near = nearest(name, fields)
    return ConfigError(
        f"{source}: {_dotted(path, name)}: there is no such key.",
        remedy=f"Did you mean {_dotted(path, near)}?" if near else _listed(fields),
    )


def _listed(names: Sequence[str]) -> str:
    return f"Expected one of: {', '.join(names)}." if names else ""


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _descend(type_: Any, data: Any, steps: Sequence[str]) -> tuple[Any, Any]:
    """The type and the value at the end of the path."""
    for step in steps:
        if isinstance(data, dict):
            data = data.get(step)
        elif isinstance(data, list | tuple) and step.isdecimal() and int(step) < len(data):
            data = data[int(step)]
        type_ = _member(type_, step)
    return type_, data


def _member(type_: Any, step: str) -> Any:
    struct = _struct(type_)
    if struct is not None:
        return typing.get_type_hints(struct, include_extras=True).get(step)
    return next(iter(typing.get_args(_unwrapped(type_))), None)


def _unwrapped(type_: Any) -> Any:
    while typing.get_origin(type_) is typing.Annotated:
        type_ = typing.get_args(type_)[0]
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        rest = [arg for arg in typing.get_args(type_) if arg is not types.NoneType]
        return _unwrapped(rest[0]) if len(rest) == 1 else type_
    return type_


def _struct(type_: Any) -> type[msgspec.Struct] | None:
    plain = _unwrapped(type_)
    return plain if isinstance(plain, type) and issubclass(plain, msgspec.Struct) else None


def _fields(type_: Any) -> list[str]:
    struct = _struct(type_)
    return list(struct.__struct_fields__) if struct else []


def _choices(type_: Any) -> list[str]:
    plain = _unwrapped(type_)
    return [str(arg) for arg in typing.get_args(plain)] if typing.get_origin(plain) is typing.Literal else []
