"""What reward functions are given and give back, and how a completion is read."""

import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

RewardFunction = Callable[..., Sequence[float]]
"""TRL's signature: (prompts, completions, **columns) -> one number a completion."""

Completion = str | Sequence[Mapping[str, Any]]
"""Text, or the messages of an assistant."""

Answer = str | Sequence[str] | None
"""What an example's completions are compared with: one text, or several of which any will do."""


def bounded(function: RewardFunction) -> RewardFunction:
    """Marks a function that limits the time of each completion itself: past its time, no hanging row is looked for."""
    function.bounded = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


Check = Callable[[Mapping[str, Sequence[Any]]], None]
"""Looks at the columns of examples for what a reward cannot score. Raises RowError; ValueError for a whole column."""


def checked(check: Check) -> Callable[[RewardFunction], RewardFunction]:
    """Marks a function with what is to be said of the data before a run."""

    def mark(function: RewardFunction) -> RewardFunction:
        function.check_columns = check  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


def check_of(function: RewardFunction) -> Check | None:
    """What `checked` has marked a function with."""
    return getattr(function, "check_columns", None)


class RowError(ValueError):
    """A reward cannot score one row, and says which."""

    def __init__(self, row: int, what: str) -> None:
        super().__init__(what)
        self.row = row


def text_of(completion: Completion) -> str:
    """What the model wrote, as one string."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def last_block(text: str, languages: Collection[str]) -> str | None:
    """The inside of the last fenced block in one of these languages, without a common indent; None without one.

    The language is the first word behind the fence. A block whose end is missing goes to the end of the text.
    """
    found: str | None = None
    inside: list[str] | None = None
    wanted = False
    for line in text.splitlines(keepends=True):
        mark = line.strip()
        if inside is not None and mark != "```":
            inside.append(line)
        elif inside is not None:
            found = "".join(inside) if wanted else found
            inside = None
        elif mark.startswith("```"):
            inside, wanted = [], mark[3:].strip().lower().partition(" ")[0] in languages
    found = "".join(inside) if inside is not None and wanted else found
    return None if found is None else textwrap.dedent(found)
