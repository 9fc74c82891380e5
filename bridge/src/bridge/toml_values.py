"""Values and keys as TOML writes them. The standard library only reads it."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A value as it is written in TOML; an unset one in words."""
    return "not set" if value is None else _value(value)


def toml_key(key: str) -> str:
    """A key, in quotes where it needs them."""
    return key if _BARE.fullmatch(key) else _string(key)


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
            inner = (f"{toml_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{{', '.join(inner)}}}"
    raise TypeError(f"TOML cannot hold {value!r}")


def _string(text: str) -> str:
    # JSON's string is TOML's basic string, but for DEL, and for surrogate pairs beyond the basic plane.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
