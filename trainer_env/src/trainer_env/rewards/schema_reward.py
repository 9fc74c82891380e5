"""A reward for JSON that fits a schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_env.rewards.completions import Completion, RewardFunction, last_block, text_of

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_VALUES = ("enum", "const", "default", "examples")
"""Keywords whose values are no schemas."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def json_schema(*, schema: Mapping[str, Any] | bool | str, parses: float = 0.0) -> RewardFunction:
    """1 if the completion is JSON that fits the schema, `parses` if it is other JSON, else 0.

    The JSON is all of the completion or its last ```json block. schema: a JSON Schema, or the path of a file with one;
    its $schema names the draft (2020-12 for none or an unknown one). References outside it are refused. Raises
    ValueError.
    """
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    if not 0 <= parses <= 1:
        raise ValueError(f"parses: expected a share from 0 to 1, got {parses}")
    content: Any = _read(Path(schema)) if isinstance(schema, str) else schema
    if not isinstance(content, Mapping | bool):
        raise ValueError(f"schema: expected a JSON object, got {content!r:.80}")  # noqa: TRY004 (a setting's value)
    if isinstance(content, Mapping) and not isinstance(content.get("$schema", ""), str):
        raise ValueError(f"schema: $.$schema: expected text, got {content['$schema']!r:.80}")  # noqa: TRY004
    kind = validator_for(content, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(content)  # pyright: ignore[reportArgumentType] (true and false are schemas too)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: {error.json_path}: {error.message:.200}") from None
    # With a registry of its own nothing is fetched, whatever a reference says.
    validator = kind(content, registry=Registry())
    _check_references(content, str(kind.META_SCHEMA["$schema"]))

    def score(completion: Completion) -> float:
        text = text_of(completion)
        block = last_block(text, ("json",))
        try:
            value = json.loads(text if block is None else block, parse_constant=_refuse)
        except (ValueError, RecursionError):
            # Not JSON, a number of thousands of digits, or nested so deep that nobody could read it.
            return 0.0
        try:
            return 1.0 if validator.is_valid(value) else parses
        except (ValueError, OverflowError, RecursionError):
            # A number beyond a float's range, or nested deeper than the validator goes.
            return parses
        except Unresolvable as error:
            raise ValueError(f"the schema has a reference that leads nowhere: {error.ref}") from None

    def reward(*, completions: Sequence[Completion], **_: Any) -> list[float]:
        return [score(completion) for completion in completions]

    return reward


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"schema: {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"schema: {path}: not JSON: {error}") from None


def _check_references(schema: Any, draft: str) -> None:
    """Raise ValueError for a reference that leads nowhere in it. Parts with an $id of their own are left out."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    resolver = Registry().resolver_with_root(specification_with(draft).create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(
                f"schema: {reference!r} leads nowhere in the schema; what it stands for belongs under $defs"
            ) from None


def _references(schema: Any, *, by_name: bool = False) -> Iterator[str]:
    """The references in a schema; by_name: in a mapping whose keys are names of the schemas in it."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if not by_name and key in _REFERENCES and isinstance(value, str):
                yield value
            elif (by_name or key not in _VALUES) and not (isinstance(value, Mapping) and "$id" in value):
                yield from _references(value, by_name=not by_name and key in _BY_NAME)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
