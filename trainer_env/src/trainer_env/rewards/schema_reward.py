"""A reward for JSON that fits a schema."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_env.rewards.completions import Completion, RewardFunction, last_block, text_of


def json_schema(*, schema: Mapping[str, Any] | bool | str, parses: float = 0.0) -> RewardFunction:
    """1 if the completion is JSON that fits the schema, `parses` if it is other JSON, else 0.

    The JSON is all of the completion or its last ```json block. schema: a JSON Schema, or the path of a file with one;
    its $schema names the draft. References outside it are refused. Raises ValueError.
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
    kind = validator_for(content, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(content)  # pyright: ignore[reportArgumentType] (true and false are schemas too)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema: {error.json_path}: {error.message:.200}") from None
    # With a registry of its own nothing is fetched, whatever a reference says.
    validator = kind(content, registry=Registry())
    _check_references(content)

    def score(completion: Completion) -> float:
        text = text_of(completion)
        block = last_block(text, ("json",))
        try:
            value = json.loads(text if block is None else block, parse_constant=_refuse)
            return 1.0 if validator.is_valid(value) else parses
        except (ValueError, RecursionError):
            # Not JSON, a number of thousands of digits, or nested so deep that nobody could read it.
            return 0.0
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


def _check_references(schema: Any) -> None:
    """Raise ValueError for a reference that leads nowhere in it. Parts with an $id of their own are left out."""
    from referencing import Registry, Specification
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    root = Specification.detect(schema) if isinstance(schema, Mapping) and "$schema" in schema else DRAFT202012
    resolver = Registry().resolver_with_root(root.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ValueError(
                f"schema: {reference!r} leads nowhere in the schema; what it stands for belongs under $defs"
            ) from None


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
                yield value
            elif not (isinstance(value, Mapping) and "$id" in value):
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
