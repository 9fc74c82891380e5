"""What each setting of a Struct means, in words: its type, its default, and the string under its field."""

import ast
import functools
import inspect
import itertools
import re
import sys
import types
import typing
from typing import Any

import msgspec

from bridge.toml_values import toml_value

_INDEX = re.compile(r"\.\d+(?=\.|$)")


class Words(msgspec.Struct, frozen=True):
    """A setting in words. default: as TOML; empty when it has to be set. section: what its table is about."""

    key: str
    takes: str
    default: str
    meaning: tuple[str, ...]
    section: str


def keys(root: type[msgspec.Struct]) -> list[str]:
    """Every setting by its dotted key, without the numbers of lists; sections too."""
    return list(_fields(root, ""))


def plain(key: str) -> str:
    """A key without the numbers of lists."""
    return _INDEX.sub("", key)


def words(root: type[msgspec.Struct], key: str) -> Words:
    """What a setting is, takes and means; one of `keys`, numbers of lists may be in it. Raises KeyError."""
    field, owner = _fields(root, "")[plain(key)]
    said = _docstrings(owner).get(field.name, "")
    return Words(
        key=key,
        takes=takes(field.type),
        default=_default(field),
        meaning=(said,) if said else (),
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


@functools.cache
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


@functools.cache
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
