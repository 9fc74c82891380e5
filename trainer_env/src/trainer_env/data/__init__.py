"""Prompts and answers: what a run trains on, and what it holds out to measure by."""

import random
import string
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.config import DataConfig
from trainer_env.data.sources import BUILTIN, Row, read_rows
from trainer_env.data.verifiers_source import PREFIX

RESERVED = frozenset(
    {
        *("prompts", "completion", "completions", "completion_ids", "finish_reason"),
        *("trainer_state", "log_extra", "log_metric", "environments", "image", "images", "tools"),
    }
)
"""Names that TRL gives a meaning of its own: columns called so stay behind."""


ROLES = ("system", "user", "assistant", "tool")
"""What chat templates commonly know."""

Message = dict[str, str]
"""One turn of a chat: its role, one of ROLES, and its content."""

Prompt = list[Message] | str


Answer = str | list[str] | None
"""What completions are compared with: one text, or several of which any will do."""


class Example(msgspec.Struct, frozen=True):
    """One prompt, what its completions are compared with, and the dataset's other columns, which rewards may read."""

    prompt: Prompt
    answer: Answer = None
    columns: dict[str, Any] = {}

    def row(self) -> dict[str, Any]:
        """The example as a row of TRL's dataset. A column called answer is there where none was named as the answer."""
        return {"answer": self.answer, **self.columns, "prompt": self.prompt}


def column_names(examples: Sequence[Example]) -> list[str]:
    """Every column that any of the examples has, sorted."""
    return sorted({name for example in examples for name in example.row()})


def columns(examples: Sequence[Example], names: Sequence[str]) -> dict[str, list[Any]]:
    """Examples as columns, which is how TRL and reward functions take them; None where an example lacks one."""
    rows = [example.row() for example in examples]
    return {name: [row.get(name) for row in rows] for name in names}


class Data(msgspec.Struct, frozen=True):
    """The examples of a run. evaluation is empty when nothing is held out."""

    train: list[Example]
    evaluation: list[Example]


def load(config: DataConfig, seed: int) -> Data:
    """Read the examples; the same seed holds out the same ones. Raises ConfigError, naming the row and the column."""
    rows = read_rows(config.source, config.subset, config.split, config.args)
    examples = _examples(config, rows, config.source)
    if config.eval_split and config.eval_size:
        _check_eval_split(config)
        # Another split of a hub dataset; beside a file or an environment, another one.
        held_source = config.source if _is_hub(config.source) else config.eval_split
        held_rows = read_rows(held_source, config.subset, config.eval_split, config.args)
        held = _examples(config, held_rows, f"{held_source} ({config.eval_split})")
        evaluation = _pick(held, min(config.eval_size, len(held)), seed)[0]
        train = examples
    else:
        if config.eval_size >= len(examples):
            raise ConfigError(
                f"data.eval_size: holding {config.eval_size} out of {len(examples)} examples leaves none to train on.",
                remedy="Set a smaller data.eval_size; 0 holds nothing out.",
            )
        evaluation, train = _pick(examples, config.eval_size, seed)
    return Data(train[: config.max_examples or None], evaluation)


def require_whole_characters(text: str, where: str) -> None:
    """Refuse text that is none: JSON can write half of a surrogate pair, which nothing can encode. where: for people.

    Raises ConfigError.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: half of a surrogate pair, {text[error.start]!a}, at character {error.start + 1}.",
            why="Text that was cut between two \\u escapes of one character ends, or begins, with such a half.",
            remedy="Mend the text, or remove it.",
        ) from None


def _check_eval_split(config: DataConfig) -> None:
    split = config.eval_split
    if config.source.startswith(BUILTIN):
        raise ConfigError(
            f"data.eval_split: {config.source} has no split {split!r}.",
            remedy="Leave data.eval_split out: data.eval_size examples are held out.",
        )
    if not _is_hub(config.source) and not split.startswith(PREFIX) and not Path(split).is_file():
        raise ConfigError(
            f"data.eval_split: {split!r} is no file.",
            why=f"{config.source} has no splits, so what is held out comes from a source of its own.",
            remedy="Name a file, or leave data.eval_split out: data.eval_size examples are held out.",
        )


def _is_hub(source: str) -> bool:
    return not source.startswith(PREFIX) and not source.lower().endswith((".jsonl", ".csv", ".parquet"))


def _pick(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Some examples at random, and the others, each in their order."""
    chosen = set(random.Random(seed).sample(range(len(examples)), count))  # noqa: S311 (a split, not a secret)
    picked = [example for index, example in enumerate(examples) if index in chosen]
    return picked, [example for index, example in enumerate(examples) if index not in chosen]


def _examples(config: DataConfig, rows: Sequence[Row], source: str) -> list[Example]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for setting, name in _needed(config):
        if name not in columns:
            near = nearest(name, columns)
            raise ConfigError(
                f"{source}: {setting}: there is no column {name!r}; there are: {', '.join(columns)}.",
                remedy=f"Did you mean {near!r}?" if near else f"Set {setting} to one of them.",
            )
    return [_example(config, row, f"{source}: row {number}") for number, row in enumerate(rows, start=1)]


def _needed(config: DataConfig) -> list[tuple[str, str]]:
    """The columns that a config asks for, each with the setting that names it."""
    if config.prompt_template:
        fields = [name for _, name, _, _ in string.Formatter().parse(config.prompt_template) if name]
        needed = [("data.prompt_template", name.split(".")[0].split("[")[0]) for name in fields]
    else:
        needed = [("data.prompt_column", config.prompt_column)]
    return [*needed, ("data.answer_column", config.answer_column)] if config.answer_column else needed


def _example(config: DataConfig, row: Row, where: str) -> Example:
    for _, name in _needed(config):
        if row.get(name) is None and name != config.answer_column:
            raise ConfigError(f"{where}: column {name!r} is empty.", remedy="Remove the row, or fill it in.")
    value = _formatted(config.prompt_template, row, where) if config.prompt_template else row[config.prompt_column]
    answer = _answer(config, row, where)
    taken = ("prompt", "answer") if config.answer_column else ("prompt",)
    columns = {name: item for name, item in row.items() if name not in RESERVED and name not in taken}
    if not config.prompt_template:
        where = f"{where}: column {config.prompt_column!r}"
    return Example(_prompt(config, value, where), answer, columns)


def _formatted(template: str, row: Row, where: str) -> str:
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: data.prompt_template does not fit it: {error}.") from None


def _prompt(config: DataConfig, value: Any, where: str) -> Prompt:
    if isinstance(value, str) and value.strip():
        require_whole_characters(value, where)
        if not config.chat:
            return value
        messages = [{"role": "user", "content": value}]
    elif isinstance(value, list) and value:
        if not config.chat:
            raise ConfigError(f"{where}: the prompt is a list of messages.", remedy="Set data.chat = true.")
        messages = [_message(item, where) for item in value]
    else:
        raise ConfigError(f"{where}: expected the prompt as text or as a list of messages, got {value!r:.80}.")
    if config.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system_prompt})
    return messages


def _message(item: Any, where: str) -> Message:
    match item:
        case {"role": str(role), "content": str(content)}:
            if role not in ROLES:
                near = nearest(role, ROLES)
                raise ConfigError(
                    f"{where}: a message has the role {role!r:.80}; expected one of {', '.join(ROLES)}.",
                    remedy=f"Did you mean {near!r}?" if near else "",
                )
            require_whole_characters(content, where)
            return {"role": role, "content": content}
    raise ConfigError(f"{where}: expected a message with a role and a text content, got {item!r:.80}.")


def _answer(config: DataConfig, row: Mapping[str, Any], where: str) -> Answer:
    value = row.get(config.answer_column) if config.answer_column else None
    if value is None:
        return None
    accepted = [_plain(item) for item in (value if isinstance(value, list) else [value])]
    known = [item for item in accepted if item is not None]
    if not known or len(known) != len(accepted):
        raise ConfigError(
            f"{where}: column {config.answer_column!r}: expected text, a number or a list of them, got {value!r:.80}.",
            remedy='Set data.answer_column = "" and let a reward of your own read the column by its name.',
        )
    for item in known:
        require_whole_characters(item, f"{where}: column {config.answer_column!r}")
    return known if isinstance(value, list) else known[0]


def _plain(value: Any) -> str | None:
    """An answer as text, a number's included; None for what has no plain text."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float | Decimal | date) else None
