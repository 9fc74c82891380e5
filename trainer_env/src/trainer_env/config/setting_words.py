"""What each setting means, in words: read from where it is explained, the sections' fields and configs/demo.toml."""

import ast
import inspect
import itertools
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.config import TrainConfig
from trainer_env.config.toml_writer import toml_value

OTHER_HALF = ("server", "vllm", "sglang")
"""Tables of the server half: it knows their settings and their defaults, not the trainer."""

_SETTING = re.compile(r"^(?:# )?(?P<key>[A-Za-z_]\w*) = (?P<rest>.*)$")
_TABLE = re.compile(r"^\[{1,2}(?P<name>[\w.]+)\]{1,2}")
_VALUE = re.compile(r"""(?:"[^"]*"|'[^']*'|[^"'#])*""")
_INDEX = re.compile(r"\.\d+(?=\.|$)")


class Words(msgspec.Struct, frozen=True):
    """A setting in words. default: as TOML; empty when it has to be set. section: what its table is about."""

    key: str
    takes: str
    default: str
    meaning: tuple[str, ...]
    section: str


def known_keys() -> list[str]:
    """Every setting of the trainer half by its dotted key, without the numbers of lists; sections too."""
    return list(_fields(TrainConfig, ""))


def is_known(key: str) -> bool:
    """Whether `words` knows a setting or a section of that name; numbers of lists may be in it."""
    return _INDEX.sub("", key) in _fields(TrainConfig, "")


def words(key: str, demo: Path | None = None) -> Words:
    """What a setting is, takes and means. demo: a TOML file with comments to learn from. Raises ConfigError."""
    plain = _INDEX.sub("", key)
    fields = _fields(TrainConfig, "")
    if plain not in fields:
        raise _unknown(key, list(fields))
    field, owner = fields[plain]
    comments = demo_comments(demo.read_text(encoding="utf-8")) if demo and demo.is_file() else {}
    said = [_docstrings(owner).get(field.name, ""), comments.get(plain, "")]
    told = [" ".join(re.findall(r"\w+", text.lower())) for text in said]
    if told[0] in told[1]:
        said[0] = ""
    return Words(
        key=key,
        takes=takes(field.type),
        default=_default(field),
        meaning=tuple(text for text in said if text),
        section=" ".join(((_struct_in(field.type) or owner).__doc__ or "").split()),
    )


def takes(type_: Any) -> str:
    """What values a type allows, for people."""
    low = high = ""
    while typing.get_origin(type_) is typing.Annotated:
        type_, *notes = typing.get_args(type_)
        for note in notes:
            low = next((f"{word} {getattr(note, at):g}" for at, word in _LOW if getattr(note, at) is not None), low)
            high = next((f"{word} {getattr(note, at):g}" for at, word in _HIGH if getattr(note, at) is not None), high)
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    limits = " and ".join(part for part in (low, high) if part)
    if origin in (typing.Union, types.UnionType):
        parts = [takes(argument) for argument in arguments if argument is not type(None)]
        return " or ".join([*parts, "left out"] if type(None) in arguments else parts)
    if origin is typing.Literal:
        return f"one of {', '.join(toml_value(argument) for argument in arguments)}"
    if origin is tuple:
        return f"a list, each {takes(arguments[0])}"
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return f"a table of {', '.join(type_.__struct_fields__)}"
    return " ".join(filter(None, [_PLAIN.get(origin or type_, "a value"), limits]))


_LOW = (("ge", "of at least"), ("gt", "above"))
_HIGH = (("lt", "below"), ("le", "of at most"))
_PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}


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


def _fields(struct: type[msgspec.Struct], at: str) -> dict[str, tuple[msgspec.structs.FieldInfo, type[msgspec.Struct]]]:
    found = {}
    for field in msgspec.structs.fields(struct):
        key = f"{at}{field.name}"
        found[key] = (field, struct)
        inner = _struct_in(field.type)
        if inner:
            found |= _fields(inner, f"{key}.")
    return found


def _struct_in(type_: Any) -> type[msgspec.Struct] | None:
    """The section that a type is, or is a list of."""
    while typing.get_origin(type_) in (typing.Annotated, tuple):
        type_ = typing.get_args(type_)[0]
    return type_ if isinstance(type_, type) and issubclass(type_, msgspec.Struct) else None


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT and not isinstance(field.default, msgspec.Struct):
        return toml_value(field.default)
    return "{}" if field.default_factory is dict else ""


def _docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """The string under each field of a class, by the field's name."""
    tree = ast.parse(inspect.getsource(sys.modules[struct.__module__]))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == struct.__name__)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _unknown(key: str, keys: list[str]) -> ConfigError:
    head, _, rest = key.partition(".")
    if head in OTHER_HALF and rest:
        return ConfigError(
            f"{key} belongs to the server half.",
            why="Tandem's own are in server_env/config.py; those of an engine keep its own names.",
            remedy="See configs/demo.toml and docs/backends.md; `tandem-train config check` has the server half check.",
        )
    by_last = {known.rpartition(".")[2]: known for known in keys}
    near = nearest(key, keys) or by_last.get(nearest(key.rpartition(".")[2], list(by_last)), "")
    return ConfigError(
        f"There is no setting {key!r}.",
        remedy=f"Did you mean {near}?" if near else f"The sections are {', '.join(TrainConfig.__struct_fields__)}.",
    )
