"""Rows of a dataset from wherever they are: a built-in task, a file, a `verifiers` environment or the hub."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.data import verifiers_source
from trainer_env.models.hub import go_offline_unless_reachable

Row = dict[str, Any]

BUILTIN = "builtin:"


def read_rows(source: str, subset: str, split: str, arguments: Mapping[str, Any] | None = None) -> list[Row]:
    """All rows of a source. Raises ConfigError.

    subset and split matter for hub datasets only, arguments for `verifiers:` environments only.
    """
    if source.startswith(BUILTIN):
        rows = _builtin(source.removeprefix(BUILTIN))
    elif source.startswith(verifiers_source.PREFIX):
        rows = verifiers_source.read(source.removeprefix(verifiers_source.PREFIX), arguments or {})
    elif reader := _READERS.get(Path(source).suffix.lower()):
        rows = _read_file(Path(source), reader)
    elif Path(source).is_file():
        raise ConfigError(
            f"{source}: cannot tell its format from its name.", remedy=f"Name it with one of: {', '.join(_READERS)}."
        )
    else:
        rows = _hub(source, subset, split)
    if not rows:
        raise ConfigError(f"{source}: holds no examples.", remedy="Check data.source and data.split.")
    return rows


def arithmetic() -> list[Row]:
    """Every sum of two digits from 1 to 9, in order."""
    digits = range(1, 10)
    return [
        {"prompt": f"What is {x}+{y}? Answer with just the number.", "answer": str(x + y)}
        for x in digits
        for y in digits
    ]


TASKS: Mapping[str, Callable[[], list[Row]]] = {"arithmetic": arithmetic}


def _builtin(name: str) -> list[Row]:
    if name not in TASKS:
        near = nearest(name, list(TASKS))
        raise ConfigError(
            f"data.source: there is no built-in task {name!r}.",
            remedy=f"Did you mean {BUILTIN}{near}?" if near else f"There are: {', '.join(TASKS)}.",
        )
    return TASKS[name]()


def _read_file(path: Path, reader: Callable[[Path], list[Row]]) -> list[Row]:
    try:
        return reader(path)
    except FileNotFoundError:
        siblings = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        near = nearest(path.name, siblings)
        raise ConfigError(
            f"{path}: there is no such file.",
            why=f"A relative path starts from the working directory, {Path.cwd()}.",
            remedy=f"Did you mean {path.parent / near}?" if near else "Check data.source.",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"{path}:{number}: not JSON: {error.msg} at column {error.colno}.",
                    remedy="A JSONL file has one JSON object a line.",
                ) from None
            if not isinstance(row, dict):
                raise ConfigError(f"{path}:{number}: expected a JSON object, got {line.strip()[:60]}")
            rows.append(row)
    return rows


def _csv(path: Path) -> list[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        rows = []
        try:
            for row in reader:
                if None in row or None in row.values():
                    width = len(reader.fieldnames or ())
                    raise ConfigError(f"{path}:{reader.line_num}: expected {width} fields, as in the first line.")
                rows.append(dict(row))
        except csv.Error as error:
            raise ConfigError(f"{path}:{reader.line_num}: not CSV: {error}.") from None
    return rows


def _parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: not a Parquet file: {error}.") from None


_READERS: Mapping[str, Callable[[Path], list[Row]]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}


def _hub(name: str, subset: str, split: str) -> list[Row]:
    offline = go_offline_unless_reachable()
    # Four seconds to import, so only for those who need it.
    import datasets

    try:
        dataset = datasets.load_dataset(name, subset or None, split=split)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        # Missing dataset, subset or split, no network, no permission: the hub's own first line says which.
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"data.source {name!r} cannot be loaded: {said[0]}",
            why=offline
            or "It is neither a file here nor a dataset that the Hugging Face hub, or its local cache, has.",
            remedy="Check data.source, data.subset and data.split, and the network.",
        ) from error
    return [dict(row) for row in dataset]
