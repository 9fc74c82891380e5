"""The proof of sync, as far as the server sees it: a canary is an adapter with a large effect that never serves.

The trainer sends it once and judges the answers. The server keeps it, and asks the same of every later life of the
engine and after every wake, before anybody gets an answer: an engine that answers otherwise than it did does not serve.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge import protocol as p
from bridge.errors import BridgeError, EngineFailed, Refused
from server_env.adapters.peft_adapter import check
from server_env.adapters.versions import Adapters
from server_env.engines.engine import Engine, EngineGone
from server_env.gpus.sleeping import Sleeper
from server_env.metrics import Proof
from server_env.supervision.replica import UNLOAD_TIMEOUT_S
from server_env.supervision.slots import GUEST
from server_env.tasks import to_its_end, together

log = logging.getLogger(__name__)

COMPLETIONS, SAMPLED_TOKENS = 4, 2
"""Of a prompt over a cached prefix. Side by side they take the engine fewer steps than one after the other."""
FIRST = p.Sampling(max_tokens=1, ignore_eos=True)
SAMPLED = p.Sampling(max_tokens=SAMPLED_TOKENS, ignore_eos=True)

NOISE = 0.15
"""Mean difference between two answers to one question. In bfloat16 another order of summation moves a logprob by 0.05
in the mean; without the adapter, or with another base model, the answers lie about 1 apart."""


@dataclass(frozen=True)
class Kept:
    """A canary that was answered. rows: what is scored."""

    path: Path
    rows: tuple[list[int], ...]
    answers: p.CanaryScored


class CanaryCheck:
    """The canary of one server; see `p.Canary`."""

    def __init__(self, adapters: Adapters, timeout_s: float, proved: Callable[[Proof, float], None]) -> None:
        """timeout_s: for an engine to answer again. proved: told how each such answer turned out, and its seconds."""
        self._adapters = adapters
        self._timeout_s = timeout_s
        self._proved = proved
        self._numbers = itertools.count(1)
        self._kept: Kept | None = None

    async def answer(self, request: p.Canary, data: memoryview | None, sleeper: Sleeper) -> p.CanaryScored:
        """Load a trainer's canary, answer its questions, and keep it in place of the last one.

        Raises Refused for an adapter that cannot be served or rows that cannot be scored.
        """
        rows = tuple(p.unpack_ids(row) for row in request.rows)
        if not rows or min(map(len, rows)) < 2:
            raise Refused("A canary needs rows of two tokens or more.")
        replicas, spool = self._adapters.replicas, self._adapters.spool
        await sleeper.until_awake()
        async with self._adapters.room_for_a_guest(), sleeper.working():
            path = spool.folder / f"canary-{next(self._numbers)}"
            try:
                await to_its_end(asyncio.to_thread(self._write, path.name, request, data))
                asked, answers = await replicas.call(
                    lambda engine: self._ask_whom(engine, path, rows), adapter=GUEST, as_guest=True
                )
            except BaseException:
                spool.delete(path)
                raise
            last, self._kept = self._kept, Kept(path, rows, answers)
            await replicas.prove_all(but=asked)
        if last:
            await asyncio.to_thread(spool.delete, last.path)
        log.info("canary %s: %s", path.name, _figures(answers))
        return answers

    async def require_the_same(self, engine: Engine, /, *, alone: bool) -> None:
        """Raise EngineFailed unless an engine answers as it did. Without a canary: nothing.

        alone: it works on nothing else, so that there is a limit to how long it may take. Otherwise the canary waits
        its turn among long completions, and whether the engine gets on at all is watched elsewhere.
        """
        kept = self._kept
        if kept is None:
            return
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s if alone else None):
                found = await self._ask(engine, kept.path, kept.rows)
        except TimeoutError:
            raise EngineFailed(f"The engine did not answer for the canary within {self._timeout_s:g} s.") from None
        except Refused as error:
            raise EngineFailed(f"The canary, which was answered before, is refused: {error.what}") from None
        wrong = difference(kept.answers, found)
        self._proved("disagrees" if wrong else "agrees", time.monotonic() - started)
        if wrong:
            log.error("canary: %s (%s)", wrong, _figures(found))
            raise EngineFailed(
                f"The engine does not compute what it did: {wrong}.",
                why="It came back with another base model, without adapters, or with a cache of somebody else's.",
                remedy="Look at engine.log; whatever changed the model's files or the engine's flags is the cause.",
            )
        log.info("canary: this engine answers as the last one did; %s", _figures(found))

    def _write(self, name: str, request: p.Canary, buffer: memoryview | None) -> None:
        adapters, data = self._adapters, memoryview(b"") if buffer is None else buffer
        check(request.adapter_config, data, max_rank=adapters.limits.max_rank, base=adapters.base)
        adapters.spool.write(name, data, request.digest, request.adapter_config)

    async def _ask_whom(self, engine: Engine, path: Path, rows: Sequence[list[int]]) -> tuple[Engine, p.CanaryScored]:
        return engine, await self._ask(engine, path, rows)

    async def _ask(self, engine: Engine, path: Path, rows: Sequence[list[int]]) -> p.CanaryScored:
        """Everything that `p.CanaryScored` holds. The name is new each time, for engines cache under names."""
        name = f"{path.name}-{next(self._numbers)}"
        started = time.monotonic()
        await engine.load_adapter(name, path)
        load_s = time.monotonic() - started
        prefix = [token for row in rows for token in row]
        try:
            base, adapted, (sampled, rescored) = await together(
                [
                    together(engine.score("", row) for row in rows),
                    together(engine.score(name, row) for row in rows),
                    over_a_cached_prefix(engine, name, prefix),
                ]
            )
        finally:
            await _unload(engine, name)
        return p.CanaryScored(
            base=tuple(map(p.pack_logprobs, base)),
            adapted=tuple(map(p.pack_logprobs, adapted)),
            sampled=p.pack_logprobs(sampled),
            rescored=p.pack_logprobs(rescored),
            load_s=load_s,
        )


async def over_a_cached_prefix(engine: Engine, adapter: str, prefix: Sequence[int]) -> tuple[list[float], list[float]]:
    """Logprobs of tokens sampled under an adapter after the base model has filled the cache, and as they are scored."""
    await engine.generate("", prefix, 1, FIRST)
    completions = await engine.generate(adapter, prefix, COMPLETIONS, SAMPLED)
    answers = [p.unpack_ids(completion.token_ids) for completion in completions]
    scores = await together(engine.score(adapter, [*prefix, *ids]) for ids in answers)
    sampled = [logprob for completion in completions for logprob in p.unpack_logprobs(completion.logprobs)]
    scored = [logprob for ids, score in zip(answers, scores, strict=True) for logprob in score[-len(ids) :]]
    return sampled, scored


async def _unload(engine: Engine, name: str) -> None:
    """As well as it goes: an engine that dies, or that has just refused the canary, has nothing to unload."""
    with contextlib.suppress(TimeoutError, BridgeError, EngineGone):
        async with asyncio.timeout(UNLOAD_TIMEOUT_S):
            await engine.unload_adapter(name)


def difference(expected: p.CanaryScored, found: p.CanaryScored) -> str:
    """What an engine answers otherwise than it did; empty when nothing. Samples differ, so these are not compared."""
    for name, what in (("base", "the base model's logprobs"), ("adapted", "logprobs under the canary")):
        off = _mean(_apart(getattr(expected, name), getattr(found, name)))
        if off > NOISE:
            return f"{what} are {off:.3f} away in the mean"
    stale = _mean(_apart([found.sampled], [found.rescored]))
    if stale > NOISE + _mean(_apart([expected.sampled], [expected.rescored])):
        return f"over a prefix that the base model had cached, sampled logprobs are {stale:.3f} away from scored ones"
    return ""


def _apart(ours: Sequence[p.Logprobs], theirs: Sequence[p.Logprobs]) -> list[float]:
    pairs = zip(map(p.unpack_logprobs, ours), map(p.unpack_logprobs, theirs), strict=True)
    return [abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _figures(answers: p.CanaryScored) -> str:
    shift, cached = _apart(answers.base, answers.adapted), _apart([answers.sampled], [answers.rescored])
    return (
        f"it moves {len(shift)} logprobs by {_mean(shift):.3f} in the mean; over a cached prefix sampled and scored "
        f"logprobs are {_mean(cached):.3f} apart; loaded in {1000 * answers.load_s:.0f} ms"
    )
