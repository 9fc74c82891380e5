"""The run's rewards as TRL calls them, and the batch they scored, as people read it."""

from collections.abc import Callable, Sequence
from typing import Any

from trainer_env.rewards import Reward, score
from trainer_env.runs.records import Sample

_TRL_ONLY = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL adds to a row's columns for reward functions of its own style."""


class Scoring:
    """Hands each reward to TRL and remembers what it gave the latest generation batch.

    TRL calls one reward after the other with the same batch: the first call runs them all, the others find theirs done.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self._scores: dict[str, list[float]] = {}
        self._untaken: set[str] = set()
        self._prompts: list[Any] = []
        self._completions: list[Any] = []
        self._columns: dict[str, list[Any]] = {}

    @property
    def weights(self) -> list[float]:
        """One a reward, in TRL's order."""
        return [reward.weight for reward in self._rewards]

    def functions(self) -> list[Callable[..., list[float]]]:
        """One function a reward, named after it, for TRL's reward_funcs."""
        return [self._function(reward) for reward in self._rewards]

    def _function(self, reward: Reward) -> Callable[..., list[float]]:
        def scores(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
            same = completions is self._completions and prompts is self._prompts
            if reward.name not in self._untaken or not same:
                self._run(prompts, completions, columns)
            self._untaken.remove(reward.name)
            return self._scores[reward.name]

        scores.__name__ = reward.name
        return scores

    def _run(self, prompts: list[Any], completions: list[Any], columns: dict[str, Any]) -> None:
        kept = {name: values for name, values in columns.items() if name not in _TRL_ONLY}
        self._untaken.clear()
        self._scores = score(self._rewards, prompts, completions, **kept).each
        self._prompts, self._completions, self._columns = prompts, completions, kept
        self._untaken.update(self._scores)

    def samples(self, step: int, versions: Sequence[int]) -> list[Sample]:
        """The latest generation batch with its rewards. versions: the adapter version that sampled each row."""
        answers = self._columns.get("answer") or [None] * len(versions)
        reasons = self._columns.get("finish_reason") or [None] * len(versions)
        return [
            Sample(
                phase="train",
                step=step,
                version=version,
                prompt=readable(self._prompts[row]),
                completion=readable(self._completions[row]),
                reward=sum(reward.weight * self._scores[reward.name][row] for reward in self._rewards),
                rewards={name: scores[row] for name, scores in self._scores.items()},
                answer=readable_answer(answers[row]),
                finish_reason=reasons[row],
            )
            for row, version in enumerate(versions)
        ]


def readable(text: str | list[dict[str, Any]]) -> str:
    """A prompt or completion as one text: a conversation's turns, one after the other."""
    return text if isinstance(text, str) else "\n".join(str(message["content"]) for message in text)


def readable_answer(answer: Any) -> str | None:
    """An answer as one text: several accepted ones with a bar between them; one that only a reward knows as Python."""
    if answer is None:
        return None
    text = " | ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
    return text.encode(errors="backslashreplace").decode()
