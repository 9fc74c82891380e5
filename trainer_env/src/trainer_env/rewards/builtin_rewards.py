"""The rewards that come with Tandem. Each name in BUILTINS makes a reward function from the args of its config."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_env.rewards.code_reward import code_execution
from trainer_env.rewards.completions import Answer, Completion, RewardFunction, RowError, checked, text_of
from trainer_env.rewards.judge_reward import llm_judge
from trainer_env.rewards.regex_reward import regex
from trainer_env.rewards.schema_reward import json_schema
from trainer_env.rewards.verifiers_reward import verifiers

# A sign counts only where no digit stands before it: the last integer of "12-4" is 4, of "it is -4" it is -4.
# The second group is a fraction; that of ".5" has nothing before it.
_WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_INTEGER = re.compile(rf"(?<!\d)(-?{_WHOLE})(\.\d+)?|(?<![\w.])(\.\d+)")
_NUMBER = re.compile(rf"(?<![\d.])-?(?:{_WHOLE}(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d+)?")
_MARKED = re.compile(r"####\s*(-?)(?:\$\s*)?(-?[\d,]*\.?\d+)")


def last_number(text: str) -> float | None:
    """The last number of a text; commas between thousands belong to it."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def gsm8k_answer(text: str) -> float | None:
    """The number after the last `####`, as GSM8K ends its answers; None without one."""
    marked = _MARKED.findall(text)
    if not marked:
        return None
    before, number = marked[-1]
    return float(number.replace(",", "")) * (-1 if before else 1)


def integer_answer(*, ending: float = 0.2) -> RewardFunction:
    """`ending` for a completion that ends within its budget, and 1 if its last integer is the answer as well."""

    @_answers(_integer)
    def reward(
        *,
        completions: Sequence[Completion],
        answer: Sequence[Answer],
        finish_reason: Sequence[str],
        **_: Any,
    ) -> list[float]:
        return [
            0.0
            if finish != "stop"
            else ending + (1 - ending) * (_last_integer(text_of(completion)) == _integer(target))
            for completion, target, finish in zip(completions, answer, finish_reason, strict=True)
        ]

    return reward


def exact_match(*, ignore_case: bool = False) -> RewardFunction:
    """1 if the completion is the answer, or one of several, white space around both aside."""

    def plain(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    @_answers(_accepted)
    def reward(*, completions: Sequence[Completion], answer: Sequence[Answer], **_: Any) -> list[float]:
        return [
            float(plain(text_of(completion)) in {plain(accepted) for accepted in _accepted(target)})
            for completion, target in zip(completions, answer, strict=True)
        ]

    return reward


def numeric_match(*, tolerance: float = 1e-6) -> RewardFunction:
    """1 if the completion's last number is the answer, or one of several, within a relative tolerance."""

    @_answers(lambda answer: [_number(text) for text in _accepted(answer)])
    def reward(*, completions: Sequence[Completion], answer: Sequence[Answer], **_: Any) -> list[float]:
        return [
            max(_close(last_number(text_of(completion)), _number(text), tolerance) for text in _accepted(target))
            for completion, target in zip(completions, answer, strict=True)
        ]

    return reward


def gsm8k(*, marker_required: bool = False) -> RewardFunction:
    """1 if the completion's final number is the one after `####` in the answer.

    The final number is the one after `####`; without one it is the last number, unless marker_required.
    """

    def predicted(text: str) -> float | None:
        marked = gsm8k_answer(text)
        return last_number(text) if marked is None and not marker_required else marked

    def target(answer: Answer) -> float:
        value = gsm8k_answer(_given(answer))
        if value is None:
            raise ValueError(f"the answer has no number after '####': {answer!r:.120}")
        return value

    @_answers(target)
    def reward(*, completions: Sequence[Completion], answer: Sequence[Answer], **_: Any) -> list[float]:
        return [
            _close(predicted(text_of(completion)), target(reference), 1e-6)
            for completion, reference in zip(completions, answer, strict=True)
        ]

    return reward


def length(*, target: int) -> RewardFunction:
    """1 for a completion of at most `target` tokens, falling in a straight line to 0 at twice as many."""
    if target < 1:
        raise ValueError(f"target: expected a number of tokens of at least 1, got {target}")

    def reward(*, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        return [min(1.0, max(0.0, 2 - len(ids) / target)) for ids in completion_ids]

    return reward


BUILTINS: Mapping[str, Callable[..., RewardFunction]] = {
    make.__name__: make
    for make in (
        *(integer_answer, exact_match, numeric_match, gsm8k, length, regex, json_schema),
        *(code_execution, llm_judge, verifiers),
    )
}


def _last_integer(text: str) -> int | None:
    """The last number of a text if it is an integer, as 1,234 and 15.0 are."""
    found = _INTEGER.findall(text)
    if not found:
        return None
    whole, *fraction = found[-1]
    if "".join(fraction).strip(".0"):
        return None
    # Python refuses to read thousands of digits, which a model may well write.
    return int(whole.replace(",", "") or 0) if len(whole) <= 100 else None


def _integer(answer: Answer) -> int:
    text = _given(answer)
    try:
        return int(text)
    except ValueError:
        value = _last_integer(text) if _INTEGER.fullmatch(text.strip()) else None
    if value is None:
        raise ValueError(f"the answer is no integer: {answer!r:.120}")
    return value


def _number(answer: str) -> float:
    try:
        return float(answer.replace(",", ""))
    except ValueError:
        raise ValueError(f"the answer is no number: {answer!r:.120}") from None


def _given(answer: Answer) -> str:
    """The one answer of an example."""
    accepted = _accepted(answer)
    if len(accepted) != 1:
        raise ValueError(f"this reward takes one answer, and the example has {len(accepted)}: {answer!r:.120}")
    return accepted[0]


def _accepted(answer: Answer) -> Sequence[str]:
    """Every answer that an example accepts, at least one."""
    if not answer and answer != "":
        raise ValueError("the example has no answer")
    accepted = [answer] if isinstance(answer, str) else answer
    if not isinstance(accepted, list) or not all(isinstance(text, str) for text in accepted):
        raise ValueError(f"expected the answer as text or a list of texts, got {answer!r:.120}")
    return accepted


def _answers(read: Callable[[Answer], object]) -> Callable[[RewardFunction], RewardFunction]:
    """Marks a function whose examples' answers can all be read so. read: raises ValueError."""

    def check(columns: Mapping[str, Sequence[Any]]) -> None:
        for row, answer in enumerate(columns["answer"]):
            try:
                read(answer)
            except ValueError as error:
                raise RowError(row, str(error)) from None

    return checked(check)


def _close(value: float | None, target: float, tolerance: float) -> float:
    return float(value is not None and math.isclose(value, target, rel_tol=tolerance, abs_tol=1e-9))
