"""Strict configuration: TOML to msgspec Structs. Every error has the key, what was expected and the nearest name."""

import datetime as dt
import difflib
import itertools
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bridge.errors import ConfigError

T = TypeVar("T")

_AT = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`(?P<path>\$[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_NOT_A_CHOICE = re.compile(r"Invalid (enum )?value ")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
        found = msgspec.convert(data, type_, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, type_, source) from None
    for error in _dates(found, source):
        raise error
    return found


def _dates(value: Any, source: str, path: str = "") -> Iterator[ConfigError]:
    """An error for each date and time that no field asks for by its type: written and read again, it would be text."""
    inside: list[tuple[str, Any]] = []
    match value:
        case msgspec.Struct():
            names = zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True)
            fields = [(_dotted(path, key), getattr(value, name)) for name, key in names]
            inside = [(key, field) for key, field in fields if not isinstance(field, dt.date | dt.time)]
        case dict():
            inside = [(_dotted(path, str(key)), item) for key, item in value.items()]
        case list() | tuple():
            inside = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        case dt.date() | dt.time():
            yield ConfigError(
                f"{source}: {path}: expected no date or time, got {value}.", remedy=f'Write it as text: "{value}".'
            )
    for key, item in inside:
        yield from _dates(item, source, key)


def problems(data: dict[str, Any], type_: type[Any], source: str) -> list[ConfigError]:
    """Everything that plain data has wrong, one error a key: what `decode_dict` would say of each if it were alone.

    A wrong value is left out, and one that is missing filled in, to see what else there is.
    """
    found: list[ConfigError] = []
    rest, seen = _copy(data), set[tuple[str, ...]]()
    while True:
        try:
            converted = msgspec.convert(rest, type_, strict=True)
        except msgspec.ValidationError as error:
            where = _where(str(error))
            if where in seen and not _MISSING.match(str(error)):
                return found  # Leaving it out changed nothing: there is no telling what else is wrong.
            if not any(where[:length] in seen for length in range(1, len(where) + 1)):
                found.append(_explain(str(error), rest, type_, source))
            seen.add(where)
            if not _mend(rest, str(error), where, type_):
                return found
        else:
            return [*found, *_dates(converted, source)]


def _where(message: str) -> tuple[str, ...]:
    """The keys that lead to what an error is about; to the whole list, where it is about an item."""
    matched = _AT.match(message)
    assert matched
    steps = _STEP.findall(matched["path"] or "$")
    keys = list(itertools.takewhile(lambda key: key != "...", (field or index for field, index in steps)))
    if named := _UNKNOWN.match(matched["what"]) or _MISSING.match(matched["what"]):
        return (*keys, named["name"])
    while keys and not steps[len(keys) - 1][0]:
        keys.pop()
    return tuple(keys)


def _mend(data: Any, message: str, where: tuple[str, ...], type_: Any) -> bool:
    """Take out what an error is about, or put something in its place if it is needed; whether that could be done."""
    matched = _AT.match(message)
    assert matched
    if not where:
        return False
    *parents, last = where
    place, within = _Place("", type_, data), data
    for key in parents:
        place = place.item(key) if isinstance(within, list) else place.field(key)
        within = within[int(key)] if isinstance(within, list) else within[key]
    if not _MISSING.match(matched["what"]):
        del within[last]
        return True
    wanted = place.field(last).wanted
    stand_ins = ("x", 1, 0.5, True, [], {}, [{}])
    fitting = [value for value in stand_ins if _fits(value, wanted)]
    # A table, or a list of them, that has needs of its own: they are seen next.
    within[last] = _copy(fitting[0]) if fitting else [{}] if typing.get_origin(_members(wanted)[0]) is tuple else {}
    return True


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
        match tomllib.loads(f"value = {text}"):
            case {"value": value, **others} if not others:
                return value
    except tomllib.TOMLDecodeError:
        pass
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
    what = matched["what"]
    place = _Place("", type_, data)
    for field, index in _STEP.findall(matched["path"] or "$"):
        place = place.field(field) if field else place.item(index)
    if unknown := _UNKNOWN.match(what):
        return _unknown(unknown["name"], place, source)
    if missing := _MISSING.match(what):
        return ConfigError(f"{source}: {_dotted(place.path, missing['name'])}: is missing, and has no default.")
    choices = place.choices()
    hint = nearest(place.value, choices) if isinstance(place.value, str) else ""
    return ConfigError(
        f"{source}: {place.path or 'the file'}: {_expectation(what, place)}.",
        remedy=f"The nearest valid value is {hint!r}." if hint else _listed(choices),
    )


def _unknown(name: str, place: "_Place", source: str) -> ConfigError:
    fields = place.fields()
    near = nearest(name, fields)
    return ConfigError(
        f"{source}: {_dotted(place.path, name)}: there is no such key.",
        remedy=f"Did you mean {_dotted(place.path, near)}?" if near else _listed(fields),
    )


def _expectation(what: str, place: "_Place") -> str:
    """The decoder's words in those of TOML, with the value that was found."""
    if _NOT_A_CHOICE.match(what):
        return f"expected {' or '.join(place.choices(quoted=True))}, got {place.value!r}"
    if not what.startswith("Expected"):
        return what
    text = what.replace("`", "").replace("Expected", "expected", 1).replace(" | null", "").replace("object", "table")
    if isinstance(place.value, dict | list):
        return text
    return f"{text} ({place.value!r})" if ", got" in text else f"{text}, got {place.value!r}"


def _listed(names: Sequence[str]) -> str:
    return f"Expected one of: {', '.join(names)}." if names else ""


def _dotted(path: str, name: str) -> str:
    key = name if _PLAIN_KEY.fullmatch(name) else f'"{name}"'
    return f"{path}.{key}" if path else key


class _Place(typing.NamedTuple):
    """A spot in the data: its dotted path, the type that is wanted there, the value that is."""

    path: str
    wanted: Any
    value: Any

    def field(self, name: str) -> "_Place":
        """A key of a section."""
        struct = self._struct()
        inside = self.value.get(name) if isinstance(self.value, dict) else None
        if struct is None:  # The key that tells the members of a union apart.
            tags = tuple(member.__struct_config__.tag for member in self._structs())
            return _Place(_dotted(self.path, name), typing.Literal[tags] if tags else Any, inside)
        hints = typing.get_type_hints(struct, include_extras=True)
        names = dict(zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True))
        return _Place(_dotted(self.path, name), hints.get(names.get(name, "")), inside)

    def item(self, index: str) -> "_Place":
        """An element of a list, or the value in a table (msgspec calls it `...`) that is wrong."""
        for member in _members(self.wanted):
            arguments = typing.get_args(member)
            if isinstance(self.value, dict) and typing.get_origin(member) is dict:
                for key, value in self.value.items():
                    if not _fits(value, arguments[1]):
                        return _Place(_dotted(self.path, key), arguments[1], value)
            if isinstance(self.value, list) and arguments and index.isdecimal():
                fixed = typing.get_origin(member) is tuple and arguments[-1] is not Ellipsis
                wanted = arguments[int(index) if fixed else 0]
                return _Place(f"{self.path}[{index}]", wanted, self.value[int(index)])
        return _Place(f"{self.path}[{index}]", Any, None)

    def fields(self) -> list[str]:
        """The keys that may stand here."""
        struct = self._struct()
        return list(struct.__struct_encode_fields__) if struct else []

    def choices(self, *, quoted: bool = False) -> list[str]:
        """The values that may stand here, where they can be listed."""
        members = _members(self.wanted)
        literals = [
            arg for member in members if typing.get_origin(member) is typing.Literal for arg in typing.get_args(member)
        ]
        names = [repr(arg) if quoted else str(arg) for arg in literals]
        return [*names, "true", "false"] if names and bool in members else names

    def _structs(self) -> list[type[msgspec.Struct]]:
        return [
            member
            for member in _members(self.wanted)
            if isinstance(member, type) and issubclass(member, msgspec.Struct)
        ]

    def _struct(self) -> type[msgspec.Struct] | None:
        structs = self._structs()
        if len(structs) > 1 and isinstance(self.value, dict):
            structs = [s for s in structs if self.value.get(s.__struct_config__.tag_field) == s.__struct_config__.tag]
        return structs[0] if len(structs) == 1 else None


def _members(type_: Any) -> list[Any]:
    """The types that a union allows; any other type allows itself."""
    while typing.get_origin(type_) is typing.Annotated:
        type_ = typing.get_args(type_)[0]
    if typing.get_origin(type_) in (typing.Union, types.UnionType):
        return [member for arg in typing.get_args(type_) for member in _members(arg)]
    return [type_]


def _fits(value: Any, type_: Any) -> bool:
    try:
        msgspec.convert(value, type_, strict=True)
    except msgspec.ValidationError:
        return False
    return True
