"""The settings that the installed TRL has, read from its source: importing it takes many seconds."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_UNSLOTHS_OWN = "unsloth_"
"""How the settings begin that Unsloth adds on a GPU."""

_CLASSES = (
    ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)


def unknown(names: list[str], fields: frozenset[str]) -> list[str]:
    """Those of the names that are no setting. None are where the settings are not known."""
    return [name for name in names if fields and name not in fields and not name.startswith(_UNSLOTHS_OWN)]


def grpo_fields() -> frozenset[str]:
    """The names that TRL's GRPOConfig takes; none where TRL is not installed, or is made in another way."""
    found = [frozenset(_fields(*place)) for place in _CLASSES]
    return frozenset().union(*found) if all(found) else frozenset()


def _fields(package: str, file: str, name: str) -> Iterator[str]:
    """The annotated names of a class's body, those for its own use left out."""
    spec = find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        return
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for line in node.body:
                match line:
                    case ast.AnnAssign(target=ast.Name(id=field)) if not field.startswith("_"):
                        yield field
                    case _:
                        pass
