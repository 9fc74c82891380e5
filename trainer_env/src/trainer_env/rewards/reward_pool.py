"""The rewards of a batch, all at once: each in a daemon thread of its own, under its own time limit."""

import time
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty
from typing import Any, Protocol, TypeGuard

from trainer_env.rewards import daemons
from trainer_env.rewards.completions import RowError
from trainer_env.rewards.reward_errors import RewardError, sample_at
from trainer_env.rewards.watchdog import Watchdog

SEARCH_S = 2.0
"""How long rows are run alone to find the one that fails."""
SEARCH_AT_ONCE = 8
"""How many rows are run at the same time then."""
LOCKED_S = 10.0
"""How long past a limit this thread may be kept from running at all before the process is ended."""

_SIGNAL_FAULT = "signal only works in main thread"
"""Part of what Python says of a time limit made of signals, outside the main thread."""
_WITHOUT_SIGNALS = (
    "A reward runs in a thread of its own, where a time limit made of signals (SIGALRM) does not work: turn it off; "
    "rewards.timeout_s is the limit. With math_verify: parse(…, parsing_timeout=None), verify(…, timeout_seconds=None)."
)

Columns = Mapping[str, Any]


class TimedReward(Protocol):
    """What is run here: a name, a limit in seconds for one batch, and the scores of a batch."""

    name: str
    timeout_s: float
    bounded: bool
    """Whether it limits the time of each completion itself, so that none of them hangs."""

    def scores(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Columns) -> list[float]:
        """One number a completion. Raises RewardError for anything else, or what the function raises."""
        ...


def run_together(
    rewards: Sequence[TimedReward], prompts: Sequence[Any], completions: Sequence[Any], columns: Columns
) -> list[list[float]]:
    """The scores of each reward. All start at once, so they must not share what only one thread may use.

    Raises RewardError as soon as one fails or its time is up, naming the reward and, if running rows alone shows it,
    the sample. What still runs is left to itself, in daemon threads. A function that keeps Python's lock for good, as
    a regular expression can, stops every thread: then the process ends with its stacks on stderr.
    """
    scores: dict[int, list[float]] = {}
    begun = time.monotonic()
    with Watchdog() as watchdog:
        watchdog.within(min(reward.timeout_s for reward in rewards) + SEARCH_S + LOCKED_S)
        done = daemons.start(lambda reward: reward.scores(prompts, completions, columns), rewards)
        while len(scores) < len(rewards):
            place = min(set(range(len(rewards))) - set(scores), key=lambda place: rewards[place].timeout_s)
            left = max(0.0, begun + rewards[place].timeout_s - time.monotonic())
            watchdog.within(left + SEARCH_S + LOCKED_S)
            try:
                place, outcome = done.get(timeout=left)
            except Empty:
                raise _hangs(rewards[place], prompts, completions, columns) from None
            if isinstance(outcome, RewardError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise _raised(rewards[place], outcome, prompts, completions, columns) from outcome
            scores[place] = outcome
    return [scores[place] for place in range(len(rewards))]


def _hangs(reward: TimedReward, prompts: Sequence[Any], completions: Sequence[Any], columns: Columns) -> RewardError:
    """The error for a reward whose time is up, with the first row that does not end alone either."""
    what = f"Reward {reward.name!r} did not return within {reward.timeout_s:g} s"
    count = len(completions)
    if reward.bounded:
        why = f"It limits the time of each completion itself: {count} of them take longer together."
        return RewardError(f"{what}.", why=why, remedy="Raise rewards.timeout_s, or lower the limits in its args.")
    remedy = "Give the function a limit of its own on each sample, or raise rewards.timeout_s."
    begun: dict[int, float] = {}

    def alone(row: int) -> list[float]:
        begun[row] = time.monotonic()
        return _alone(reward, row, prompts, completions, columns)

    ended = daemons.within(SEARCH_S, alone, range(count), SEARCH_AT_ONCE)
    now, long = time.monotonic(), SEARCH_S / 2
    hanging = sorted(row for row, at in begun.copy().items() if row not in ended and now - at >= long)
    if not hanging:
        why = f"{'Each' if len(ended) == count else len(ended)} of its {count} rows ends when it is run alone."
        return RewardError(f"{what}.", why=why, remedy=remedy)
    why = f"It still runs after {long:g} s on {len(hanging)} of {len(begun)} rows, each of them alone."
    return RewardError(f"{what}, {sample_at(hanging[0], prompts, completions)}", why=why, remedy=remedy)


def _raised(
    reward: TimedReward,
    error: BaseException,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Columns,
) -> RewardError:
    """The error for a reward that raised, with its row: the one it names, or the first on which it raises alone."""
    row = error.row if isinstance(error, RowError) else None
    if row is None:
        ended = daemons.within(
            SEARCH_S, lambda row: _alone(reward, row, prompts, completions, columns), range(len(completions)), at_once=1
        )
        faults = {row: outcome for row, outcome in ended.items() if _is_fault(outcome)}
        row = min(faults, default=None)
        error = error if row is None else faults[row]
    fault = ":" if isinstance(error, RowError) else f" raised {type(error).__name__}:"
    what = f"Reward {reward.name!r}{fault} {error}"
    known = [name for name, column in columns.items() if isinstance(column, list)]
    return RewardError(
        f"{what}." if row is None else f"{what}, {sample_at(row, prompts, completions)}",
        why=f"It was given the columns {', '.join(['prompts', 'completions', *known])}.",
        remedy=_WITHOUT_SIGNALS if any(_SIGNAL_FAULT in str(each) for each in _with_causes(error)) else "",
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, or while: libraries put words of their own around what Python says.

    An error can be its own cause: `raise error from error`.
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _is_fault(outcome: object) -> TypeGuard[BaseException]:
    return isinstance(outcome, BaseException) and not isinstance(outcome, RewardError)


def _alone(
    reward: TimedReward, row: int, prompts: Sequence[Any], completions: Sequence[Any], columns: Columns
) -> list[float]:
    count = len(completions)
    alone = {
        name: [column[row]] if isinstance(column, list) and len(column) == count else column
        for name, column in columns.items()
    }
    return reward.scores(prompts[row : row + 1], completions[row : row + 1], alone)
