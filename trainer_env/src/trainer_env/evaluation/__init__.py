"""The held-out examples, answered by the server and scored like any completion."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bridge.errors import ConfigError
from trainer_env.data import Example, column_names, columns
from trainer_env.evaluation.pass_at import pass_at
from trainer_env.rewards import Reward, Scores, score
from trainer_env.rewards.scoring import readable, readable_answer
from trainer_env.runs.records import Phase, Sample
from trainer_env.sampling.sampler import Sampler


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers to some examples are worth. samples: example by example, all answers to each."""

    samples: list[Sample]
    examples: int
    num_generations: int
    temperature: float
    reward_mean: float
    """Over all answers."""
    pass_at: dict[str, float]
    """k -> the chance that one of k answers is right."""


def evaluate(
    sampler: Sampler,
    examples: Sequence[Example],
    rewards: Sequence[Reward],
    *,
    n: int = 1,
    temperature: float = 0.0,
    version: int = -1,
    max_tokens: int | None = None,
    pass_threshold: float = 1.0,
    phase: Phase = "eval",
    step: int | None = None,
    scored_at_once: int = 64,
) -> Answered:
    """Have each example answered n times under an adapter version (0: the base model; -1: the newest), and score that.

    max_tokens: of an answer; None: as in training. pass_threshold: the reward from which on an answer is right.
    step: what the samples are recorded under; None: the version that answered.
    scored_at_once: answers in one batch, for which a reward's time limit is meant; those to one example stay together.
    Raises what the server answers, RewardError, and ConfigError when there is no example or n answers would be alike.
    """
    if not examples:
        raise ConfigError("There is no example to evaluate on.", remedy="Hold some out: set data.eval_size.")
    if n > 1 and not temperature:
        raise ConfigError(
            f"{n} answers to each example were asked for at temperature 0, where all {n} are alike.",
            remedy="Set a temperature above 0, or ask for one answer.",
        )
    asked = [example.prompt for example in examples]
    groups = sampler.sample(asked, n=n, temperature=temperature, max_tokens=max_tokens, version=version)
    answers = [answer for group in groups for answer in group]
    answered = [example for example in examples for _ in range(n)]
    prompts = [example.prompt for example in answered]
    texts = [sampler.decode(answer) for answer in answers]
    known = [name for name in column_names(examples) if name != "prompt"]
    given = {
        **columns(answered, known),
        "completion_ids": [answer.token_ids for answer in answers],
        "finish_reason": [answer.finish_reason for answer in answers],
    }
    completions = [_as_completion(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    scores = _scores(rewards, prompts, completions, given, max(scored_at_once // n, 1) * n)
    samples = [
        Sample(
            phase=phase,
            step=answers[row].version if step is None else step,
            version=answers[row].version,
            prompt=readable(prompts[row]),
            completion=texts[row],
            token_ids=answers[row].token_ids,
            reward=scores.total[row],
            rewards={name: each[row] for name, each in scores.each.items()},
            answer=readable_answer(given["answer"][row]),
            finish_reason=answers[row].finish_reason,
        )
        for row in range(len(answers))
    ]
    right = [is_right(total, pass_threshold) for total in scores.total]
    return Answered(
        samples=samples,
        examples=len(examples),
        num_generations=n,
        temperature=temperature,
        reward_mean=statistics.fmean(scores.total),
        pass_at=pass_at(n, [sum(right[start : start + n]) for start in range(0, len(right), n)]),
    )


def _scores(
    rewards: Sequence[Reward],
    prompts: Sequence[object],
    completions: Sequence[object],
    given: Mapping[str, list[Any]],
    at_once: int,
) -> Scores:
    """All rewards of all completions, so many at a time."""
    total: list[float] = []
    each: dict[str, list[float]] = {reward.name: [] for reward in rewards}
    for start in range(0, len(completions), at_once):
        part = slice(start, start + at_once)
        some = score(
            rewards, prompts[part], completions[part], **{name: values[part] for name, values in given.items()}
        )
        total += some.total
        for name, values in some.each.items():
            each[name] += values
    return Scores(total, each)


def is_right(reward: float, threshold: float) -> bool:
    """Whether a reward reaches the threshold. Ten rewards of 0.1 do reach 1, although their sum is a bit below it."""
    return reward >= threshold or math.isclose(reward, threshold, rel_tol=1e-9)


def _as_completion(prompt: object, text: str) -> object:
    """Rewards see what TRL gives them: a turn after a conversation, text after text."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
