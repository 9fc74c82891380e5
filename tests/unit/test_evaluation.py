"""Held-out examples: each answered n times, every answer scored, and what pass@k comes to."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import ConfigError
from trainer_env.data import Example
from trainer_env.evaluation import evaluate, is_right
from trainer_env.evaluation.pass_at import estimate, ks, pass_at
from trainer_env.rewards import Reward

COUNTS = st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(COUNTS)
def test_the_estimate_is_the_share_of_all_choices_that_hold_a_right_one(counted):
    n, right = counted
    answers = [index < right for index in range(n)]
    for k in range(1, n + 1):
        chosen = [any(choice) for choice in itertools.combinations(answers, k)]
        assert estimate(n, right, k) == pytest.approx(sum(chosen) / len(chosen))


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), min_size=1))))
def test_more_tries_never_do_worse_and_one_try_is_the_share_of_right_answers(counted):
    n, right = counted
    chances = pass_at(n, right)
    assert list(chances) == [str(k) for k in ks(n)]
    assert chances["1"] == pytest.approx(sum(right) / (n * len(right)))
    assert chances[str(n)] == pytest.approx(sum(count > 0 for count in right) / len(right))
    for fewer, more in itertools.pairwise(chances.values()):
        assert fewer <= more or math.isclose(fewer, more)
    assert all(0 <= chance <= 1 for chance in chances.values())


@given(st.integers(2, 12), st.floats(0, 1), st.data())
def test_its_mean_over_all_outcomes_is_the_chance_itself(n, p, data):
    k = data.draw(st.integers(1, n))
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * estimate(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "told"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (9, [1, 2, 4, 8, 9])]
)
def test_it_is_told_for_powers_of_two_and_n(n, told):
    assert ks(n) == told


class Sampler:
    """Answers each prompt with its words, one an answer, over and over."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def sample(self, prompts, *, n, version, **how):
        self.asked = {"n": n, "version": version, **how}
        words = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in prompts]
        return [
            [
                SimpleNamespace(
                    token_ids=[ord(word) for word in text.split()][index % 2 : index % 2 + 1],
                    version=7,
                    finish_reason="stop",
                )
                for index in range(n)
            ]
            for text in words
        ]

    def decode(self, answer):
        return "".join(map(chr, answer.token_ids))


def same(*, completions, answer, **_):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(text == wanted) for text, wanted in zip(texts, answer, strict=True)]


EXAMPLES = [Example("a b", "a"), Example("c d", "x"), Example([{"role": "user", "content": "e e"}], "e")]


def run(examples=EXAMPLES, reward=same, **how):
    sampler: Any = Sampler()
    return evaluate(sampler, examples, [Reward("same", reward)], **how), sampler.asked


def test_every_answer_is_scored_and_counted_for_its_example():
    answered, asked = run(n=4, temperature=0.7, version=7, max_tokens=5, phase="eval", step=3)
    assert asked == {"n": 4, "version": 7, "temperature": 0.7, "max_tokens": 5}
    assert (answered.examples, answered.num_generations, answered.temperature) == (3, 4, 0.7)
    assert [sample.completion for sample in answered.samples] == [*"abab", *"cdcd", *"eeee"]
    assert [sample.reward for sample in answered.samples] == [1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert answered.reward_mean == pytest.approx(0.5)
    # Two, none and four of four are right.
    assert answered.pass_at == pytest.approx({"1": 0.5, "2": (5 / 6 + 0 + 1) / 3, "4": 2 / 3})
    first = answered.samples[0]
    assert (first.phase, first.step, first.version, first.answer, first.token_ids) == ("eval", 3, 7, "a", [97])


def test_one_answer_has_pass_at_1_only_and_goes_under_the_version_that_gave_it():
    answered, asked = run()
    assert (asked["n"], asked["temperature"], asked["version"], asked["max_tokens"]) == (1, 0.0, -1, None)
    assert answered.pass_at == {"1": pytest.approx(2 / 3)}
    assert {sample.step for sample in answered.samples} == {7}


def test_an_answer_that_only_the_reward_can_read_is_shown_as_it_is():
    answered, _ = run([Example("a", columns={"answer": {"is": "a"}})], lambda *, answer, **_: [len(answer[0])])
    assert [(sample.reward, sample.answer) for sample in answered.samples] == [(1, "{'is': 'a'}")]


@pytest.mark.parametrize(("at_once", "batches"), [(8, [8, 4]), (7, [4, 4, 4]), (1, [4, 4, 4]), (64, [12])])
def test_answers_are_scored_in_batches_that_keep_an_examples_answers_together(at_once, batches):
    sizes = []

    def noted(**given):
        sizes.append(len(given["completions"]))
        assert {len(values) for values in given.values()} == {sizes[-1]}
        return same(**given)

    answered, _ = run(reward=noted, n=4, temperature=0.7, scored_at_once=at_once)
    assert sizes == batches
    assert [sample.reward for sample in answered.samples] == [1, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_the_threshold_says_what_is_right():
    def half(*, completions, **_):
        return [0.5] * len(completions)

    assert run(reward=half)[0].pass_at == {"1": 0}
    assert run(reward=half, pass_threshold=0.5)[0].pass_at == {"1": 1}
    assert run(reward=half, pass_threshold=-1)[0].pass_at == {"1": 1}


def test_rounding_does_not_keep_a_reward_below_the_threshold():
    assert sum([0.1] * 10) < 1
    assert is_right(sum([0.1] * 10), 1.0)
    assert not is_right(0.999, 1.0)


def test_answers_that_would_be_alike_are_refused():
    with pytest.raises(ConfigError, match=r"2 answers .* at temperature 0, where all 2 are alike") as refused:
        run(n=2)
    assert "temperature above 0" in refused.value.remedy


def test_without_an_example_there_is_nothing_to_evaluate():
    with pytest.raises(ConfigError, match="no example to evaluate on"):
        run(examples=[])
