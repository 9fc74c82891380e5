"""Whether trainer and server compute the same policy: the comparisons behind the proof of sync, and nothing else.

All take logprobs of the same tokens from both halves. In bfloat16 the halves differ by 0.05 in the mean, and by half a
nat at a single token, which is more than one optimizer step does. So what is compared is the *shift*: an adapter's
logprobs less the base model's, each half's by itself. What both halves compute alike cancels out, and the difference of
the base logprobs tells how large the rest may be.

Thresholds, for n tokens, with sigma the root mean square difference of the base logprobs: rounding strikes with and
without the adapter, so the difference of two shifts is of size tau = sqrt(2) * sigma when all is well. An engine that
ignores the adapter, or serves another one, makes it as large as the shift itself. Between the two lies the bound
`NOISES * tau + RELATIVE * shift`. An ignored adapter passes it once its shift is 3.3 tau (0.3 nats in bfloat16), and
noise never does: the ratio of two such figures over some dozens of tokens stays below 2 even for heavy tails, once the
few largest are left out. RELATIVE covers what grows with the adapter: engines keep it, and add it up, in bfloat16.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Verdict = Literal["agrees", "disagrees", "inconclusive"]
Check = Literal["base model", "canary", "shift", "cached prefix", "ratio", "change"]
Logprobs = Sequence[float]

NOISES = 2.5
RELATIVE = 0.25
LEFT_OUT = 32
"""One token in so many, the one that is furthest off, is left out of a root mean square."""
NOISE_FLOOR = 1e-3
"""Of sigma: in float32 the halves agree to 1e-4, and nothing smaller matters."""

SLOPE = 0.5
SIGMAS = 4.0
"""A slope of one shift over the other above SLOPE shows agreement, if it is so many standard errors from none (for
unrelated shifts 1 / sqrt(n)). So much of a module's effect is missed before it counts as left out."""
VISIBLE = 1.5
"""Smallest effect of a module, in tau, of which it can be said whether it is there."""

BASE_APART = 0.2
"""Mean difference of base logprobs: four times that of bfloat16. Another checkpoint is 0.5 and more away."""

CANARY_SHIFT = 0.3
"""Below that a canary shows nothing; it is made to shift logprobs by about 1."""

CACHED_NOISE = 0.02
CACHED_SIGMAS = 4.0
"""A stale prefix moves sampled logprobs by about the shift. Rounding moves the mean of seven, the largest of eight left
out, by a sigma or two."""

RATIO_OFF = 0.05
RATIO_ERRORS = 4.0
RATIO_TOKENS = 8
APART_TOKENS = 16
"""On-policy, the expectation of the ratio is exactly 1, whatever the rounding. A batch's mean may be off by RATIO_OFF
and by so many of its standard errors, which a single odd token raises as much as the mean."""


@dataclass(frozen=True)
class Finding:
    """What one check has come to. what: the figures, in a sentence; why: likely causes when it disagrees."""

    check: Check
    verdict: Verdict
    what: str
    why: str = ""


def sigma(trainer_base: Logprobs, server_base: Logprobs) -> float:
    """The noise between the halves: root mean square difference of their base logprobs."""
    return max(NOISE_FLOOR, rms(less(trainer_base, server_base)))


def base(trainer: Logprobs, server: Logprobs) -> Finding:
    """Whether both halves have the same base model, in precisions that are near enough."""
    apart = [abs(x) for x in less(trainer, server)]
    mean = sum(apart) / len(apart)
    good = mean <= BASE_APART  # Not a number is not good.
    return Finding(
        "base model",
        "agrees" if good else "disagrees",
        f"without an adapter the halves' logprobs of {len(apart)} tokens are {mean:.3f} apart in the mean, where "
        f"{BASE_APART:g} is allowed (the largest: {max(apart):.2f})",
        "One half has another base model, another revision of it, or quantizes it and the other does not.",
    )


def shift(trainer: Logprobs, server: Logprobs, noise: float, check: Check = "shift") -> Finding:
    """Whether an adapter does the same in both halves. trainer, server: adapted less base; noise: see `sigma`."""
    residual, size = rms(less(server, trainer)), max(rms(trainer), rms(server))
    tau = math.sqrt(2) * noise
    bound = NOISES * tau + RELATIVE * size
    figures = (
        f"the adapter shifts {len(trainer)} logprobs by {rms(trainer):.3f} in the trainer and {rms(server):.3f} on "
        f"the server (root mean square), and the shifts are {residual:.3f} apart, where {bound:.3f} is allowed"
    )
    if not residual <= bound:
        return Finding(check, "disagrees", figures, _cause(trainer, server))
    slope = _slope(trainer, server)
    seen = slope >= SLOPE and slope * math.sqrt(len(trainer)) >= SIGMAS
    return Finding(check, "agrees" if seen else "inconclusive", figures)


def canary(
    *,
    trainer_base: Logprobs,
    trainer: Logprobs,
    without: Mapping[str, Logprobs],
    server_base: Logprobs,
    server: Logprobs,
) -> Finding:
    """Whether an adapter with a large effect does the same in both halves, each of its modules included.

    without: the trainer's logprobs under the adapter less one module, by that module's name. When the server leaves the
    module out, its logprobs lack just that difference: a coefficient of 1, where noise gives one about 0.
    """
    noise = sigma(trainer_base, server_base)
    ours, theirs = less(trainer, trainer_base), less(server, server_base)
    found = shift(ours, theirs, noise, "canary")
    lacking = less(ours, theirs)
    # The trainer's noise is in its shift and in each effect alike: a weak one would seem to be missing.
    effects = {name: less(trainer, logprobs) for name, logprobs in without.items()}
    seen = {name: effect for name, effect in effects.items() if rms(effect) > VISIBLE * math.sqrt(2) * noise}
    likeliest = max(seen, key=lambda name: _along(lacking, seen[name]), default="")
    if likeliest and (missing := _along(lacking, seen[likeliest]) / _length(seen[likeliest])) > SLOPE:
        return Finding(
            "canary",
            "disagrees",
            f"{found.what}; {missing:.0%} of what {likeliest} does is missing on the server",
            f"The engine leaves {likeliest} out of the adapter.",
        )
    if unseen := sorted(effects.keys() - seen.keys()):
        found = replace(found, what=f"{found.what}; too weak to tell: {', '.join(unseen)}")
    if found.verdict == "agrees" and rms(ours) < CANARY_SHIFT:
        return replace(found, verdict="inconclusive")
    return found


def cached_prefix(sampled: Logprobs, rescored: Logprobs, noise: float) -> Finding:
    """Whether tokens sampled over a cached prefix have the logprobs that scoring, without the cache, gives them."""
    apart = sorted(abs(x) for x in less(sampled, rescored))
    kept = apart[: max(1, len(apart) - 1)] if all(map(math.isfinite, apart)) else [math.nan]
    mean, bound = sum(kept) / len(kept), CACHED_NOISE + CACHED_SIGMAS * noise
    return Finding(
        "cached prefix",
        "agrees" if mean <= bound else "disagrees",
        f"over a cached prefix {len(apart)} sampled logprobs are {mean:.3f} from scored ones in the mean, where "
        f"{bound:.3f} is allowed",
        "The engine reads the prefix from the cache of another adapter, or reports logprobs of another distribution "
        "than it samples from.",
    )


def ratio(mean: float, error: float, tokens: int, apart: float) -> Finding:
    """Whether an on-policy batch's importance ratio is 1.

    error: the standard error of its mean. apart: mean difference of the logprobs, for ratios that scatter too much to
    have a mean.
    """
    bound = RATIO_OFF + RATIO_ERRORS * error
    near = tokens < RATIO_TOKENS or abs(mean - 1) <= bound
    together = tokens < APART_TOKENS or apart <= BASE_APART
    return Finding(
        "ratio",
        "agrees" if near and together else "disagrees",
        f"the importance ratio of an on-policy batch is {mean:.3f} over {tokens} tokens, where {1 - bound:.3f} to "
        f"{1 + bound:.3f} is allowed, and the logprobs are {apart:.3f} apart in the mean, where {BASE_APART:g} is",
        "The server reports logprobs that are not at the sampling temperature, or those of another policy.",
    )


def verdict(findings: Sequence[Finding]) -> Verdict:
    """Of several checks: what the first one says, unless another one disagrees."""
    return "disagrees" if any(found.verdict == "disagrees" for found in findings) else findings[0].verdict


def _cause(trainer: Logprobs, server: Logprobs) -> str:
    ours, theirs = rms(trainer), rms(server)
    if theirs < ours / 4:
        return "The engine ignores the adapter."
    if ours < theirs / 4:
        return "The trainer computes without the adapter that it publishes."
    if _along(trainer, server) < SLOPE * _length(trainer):
        return "The engine serves another adapter than the one that was published."
    return "The engine applies the adapter in part, or at another scale."


def _slope(a: Logprobs, b: Logprobs) -> float:
    """Of the smaller over the larger: 1 for equal ones, about 0 for unrelated ones."""
    larger = max(sum(x * x for x in a), sum(x * x for x in b))
    return sum(x * y for x, y in zip(a, b, strict=True)) / larger if larger else 0.0


def _length(a: Logprobs) -> float:
    return math.sqrt(sum(x * x for x in a))


def _along(a: Logprobs, b: Logprobs) -> float:
    """How much of a lies in the direction of b."""
    length = _length(b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / length if length else 0.0


def less(a: Logprobs, b: Logprobs) -> list[float]:
    """The differences, token by token."""
    return [x - y for x, y in zip(a, b, strict=True)]


def rms(values: Logprobs) -> float:
    """Root mean square, without the largest one in LEFT_OUT; not a number if one of all is none."""
    squares = sorted(x * x for x in values)
    if not all(map(math.isfinite, squares)):
        return math.nan
    kept = squares[: len(squares) - len(squares) // LEFT_OUT]
    return math.sqrt(sum(kept) / len(kept))
