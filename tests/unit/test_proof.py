"""The comparisons of the proof of sync on made-up logprobs: noise never alarms, and each way to be wrong does."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_env.proof import comparisons

TOKENS = 94
BFLOAT16 = 0.05
"""Mean absolute difference between the halves."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def noise(rng, n=TOKENS, mean=BFLOAT16 / 2):
    """Heavy-tailed, of one half: now and then a token is off by half a nat."""
    return [rng.choice((-1, 1)) * rng.expovariate(1 / mean) * (8 if rng.random() < 0.01 else 1) for _ in range(n)]


def plus(*parts):
    return [sum(values) for values in zip(*parts, strict=True)]


def signal(rng, size, n=TOKENS):
    """A shift that most tokens feel little and some a lot. size: root mean square."""
    values = [rng.gauss(0, 1) * rng.choice((0.1, 0.1, 1.0, 3.0)) for _ in range(n)]
    scale = size / math.sqrt(sum(x * x for x in values) / n)
    return [x * scale for x in values]


def honest_shifts(rng, size, mean=BFLOAT16 / 2):
    """Both halves' shifts of the same adapter: rounding strikes with and without it."""
    true = signal(rng, size)
    return [plus(true, noise(rng, mean=mean), noise(rng, mean=mean)) for _ in range(2)]


def sigma(rng, mean=BFLOAT16 / 2):
    return comparisons.sigma(noise(rng, mean=mean), noise(rng, mean=mean))


def test_of_ten_thousand_honest_publishes_none_disagrees():
    """50 runs of 200, from a tiny adapter to one that moves logprobs by nats; each run measures its noise once."""
    verdicts = []
    for run in range(50):
        rng = random.Random(run)
        measured = sigma(rng)
        for publish in range(200):
            trainer, server = honest_shifts(rng, 0.01 * 1.04**publish)
            verdicts.append((publish, comparisons.shift(trainer, server, measured).verdict))
    assert all(verdict != "disagrees" for _, verdict in verdicts)
    assert {verdict for publish, verdict in verdicts if publish > 100} == {"agrees"}
    early = [verdict for publish, verdict in verdicts if publish < 10]
    assert early.count("inconclusive") > 0.9 * len(early)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(1e-6, 0.2), st.floats(1e-4, 20.0))
def test_no_noise_and_no_size_of_an_honest_adapter_disagrees(seed, mean, size):
    rng = random.Random(seed)
    measured = sigma(rng, mean)
    trainer, server = honest_shifts(rng, size, mean)
    assert comparisons.shift(trainer, server, measured).verdict != "disagrees"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.9, 20.0))
def test_an_ignored_adapter_and_another_adapter_disagree(seed, size):
    rng = random.Random(seed)
    measured = sigma(rng)
    trainer, _ = honest_shifts(rng, size)
    _, unrelated = honest_shifts(rng, size)
    nothing = plus(noise(rng), noise(rng))
    for server, why in ((nothing, "ignores the adapter"), (unrelated, "another adapter")):
        found = comparisons.shift(trainer, server, measured)
        assert found.verdict == "disagrees"
        assert why in found.why
    assert "trainer computes without" in comparisons.shift(nothing, trainer, measured).why


def test_in_float32_a_small_adapter_is_seen_at_once():
    rng = random.Random(1)
    measured = sigma(rng, 1e-5)
    trainer, server = honest_shifts(rng, 0.01, 1e-5)
    assert comparisons.shift(trainer, server, measured).verdict == "agrees"
    assert comparisons.shift(trainer, [0.0] * TOKENS, measured).verdict == "disagrees"


def test_an_adapter_at_another_scale_disagrees():
    rng = random.Random(2)
    trainer, server = honest_shifts(rng, 1.0)
    found = comparisons.shift(trainer, [2 * x for x in server], sigma(rng))
    assert (found.verdict, "another scale" in found.why) == ("disagrees", True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_disagrees(bad):
    fine = [0.1] * TOKENS
    broken = [bad, *fine[1:]]
    assert comparisons.shift(fine, broken, 0.1).verdict == "disagrees"
    assert comparisons.base(fine, broken).verdict == "disagrees"
    assert comparisons.cached_prefix(fine, broken, 0.1).verdict == "disagrees"


def test_bases_that_differ_by_rounding_agree_and_others_do_not():
    for seed in range(300):
        rng = random.Random(seed)
        logprobs = [-rng.expovariate(0.3) for _ in range(TOKENS)]
        assert comparisons.base(plus(logprobs, noise(rng)), plus(logprobs, noise(rng))).verdict == "agrees"
        assert comparisons.base(logprobs, plus(logprobs, signal(rng, 0.6))).verdict == "disagrees"


def canary(rng, dropped="", weak="", mean=BFLOAT16 / 2):
    """A canary of seven modules, some of which do less than others. weak: one that does next to nothing."""
    effects = {
        name: signal(rng, 0.01 if name == weak else size)
        for name, size in zip(MODULES, (0.25, 0.25, 0.5, 0.4, 0.3, 0.4, 0.5), strict=True)
    }
    base = [-rng.expovariate(0.3) for _ in range(TOKENS)]

    def computed(*left_out):
        return plus(base, *(effect for name, effect in effects.items() if name not in left_out), noise(rng, mean=mean))

    return comparisons.canary(
        trainer_base=plus(base, noise(rng, mean=mean)),
        trainer=computed(),
        without={name: computed(name) for name in MODULES},
        server_base=plus(base, noise(rng, mean=mean)),
        server=computed(dropped),
    )


def test_of_a_thousand_honest_canaries_all_agree():
    assert {canary(random.Random(seed)).verdict for seed in range(1000)} == {"agrees"}


@pytest.mark.parametrize("name", MODULES)
def test_a_dropped_module_disagrees_by_name(name):
    for seed in range(100):
        found = canary(random.Random(seed), dropped=name)
        assert found.verdict == "disagrees"
        assert f"what {name} does is missing" in found.what


def test_a_module_that_does_nothing_is_not_missed_by_chance():
    assert {canary(random.Random(seed), weak="k_proj").verdict for seed in range(500)} == {"agrees"}


def test_a_canary_that_does_too_little_proves_nothing():
    rng = random.Random(3)
    base = [-rng.expovariate(0.3) for _ in range(TOKENS)]
    small = plus(base, signal(rng, 0.1))
    found = comparisons.canary(trainer_base=base, trainer=small, without={}, server_base=base, server=small)
    assert found.verdict == "inconclusive"


def test_a_stale_prefix_disagrees_and_rounding_does_not():
    for seed in range(1000):
        rng = random.Random(seed)
        measured = sigma(rng)
        scored = [-rng.expovariate(0.5) for _ in range(8)]
        assert (
            comparisons.cached_prefix(plus(scored, noise(rng, 8), noise(rng, 8)), scored, measured).verdict == "agrees"
        )
        # What is sampled from another distribution is less likely under this one.
        stale = [x + 0.3 + rng.expovariate(1) for x in scored]
        assert comparisons.cached_prefix(stale, scored, measured).verdict == "disagrees"


def ratio_of(differences):
    ratios = [math.exp(d) for d in differences]
    n = len(ratios)
    mean = sum(ratios) / n
    error = math.sqrt(max(0.0, sum(x * x for x in ratios) / n - mean * mean) / n)
    return comparisons.ratio(mean, error, n, sum(map(abs, differences)) / n)


def test_the_ratio_of_honest_batches_of_any_size_is_no_alarm():
    for seed in range(2000):
        rng = random.Random(seed)
        tokens = rng.choice((3, 8, 16, 50, 200))
        assert ratio_of(plus(noise(rng, tokens), noise(rng, tokens))).verdict == "agrees"
        assert ratio_of([2.0] + [0.0] * tokens).verdict == "agrees"


def test_a_ratio_that_is_off_is_an_alarm():
    rng = random.Random(5)
    assert ratio_of([x - 0.1 for x in noise(rng)]).verdict == "disagrees"
    assert ratio_of([rng.gauss(0, 1) for _ in range(50)]).verdict == "disagrees"
    assert comparisons.ratio(math.nan, math.nan, 100, 0.0).verdict == "disagrees"


def test_the_first_of_several_checks_says_what_is_known_and_any_can_object():
    def of(*verdicts):
        return comparisons.verdict([comparisons.Finding("shift", verdict, "") for verdict in verdicts])

    assert of("agrees", "inconclusive") == "agrees"
    assert of("inconclusive", "agrees") == "inconclusive"
    assert of("inconclusive", "disagrees") == "disagrees"
