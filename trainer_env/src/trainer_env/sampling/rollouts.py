"""TRL's rollout_func: completions of a generation batch under an adapter version that is new enough, and of the batches
that follow it, ahead of time, as far as the bound on staleness lets them.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bridge.errors import ConfigError, StaleVersion, SyncMismatch
from bridge.protocol import Generate, Sampling, pack_ids
from trainer_env.config import TrainConfig
from trainer_env.data.ordering import Schedule
from trainer_env.sampling.prompts import Prompt
from trainer_env.sampling.sampler import Asked, Sampler


class Observer(Protocol):
    """Who works while TRL's completions are sampled, and looks at them before they are trained on."""

    def asking(self, step: int) -> None:
        """They are about to be asked for. step: optimizer steps taken, and the newest adapter version."""
        ...

    def asked(self) -> None:
        """They are being sampled."""
        ...

    def answered(self, step: int, sampled: Sequence[tuple[list[int], list[int]]]) -> None:
        """They are here: (prompt, completion) a row. What this raises ends the run."""
        ...


@dataclass(frozen=True)
class Batch:
    """What the last call for TRL brought. versions: one a row. tokens: sampled. seconds: waited for it.

    sampling_s: that the server took, from when it was asked or had done with the batch before.
    """

    versions: list[int]
    seconds: float
    tokens: int
    sampling_s: float


@dataclass(frozen=True)
class Ahead:
    """A generation batch that the server was asked for. oldest: adapter version that may sample it."""

    batch: int
    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    oldest: int
    asked: Asked


class Rollouts:
    """Generation batches from the server. schedule: the run's.

    max_staleness: optimizer steps that a completion's version may lie behind the last step that it trains, reuse of its
    batch counted; what reuse leaves of it is used to sample ahead.
    Raises ConfigError when reuse alone exceeds the bound.
    """

    def __init__(self, sampler: Sampler, config: TrainConfig, schedule: Schedule, *, max_staleness: int) -> None:
        self.sampler = sampler
        self._config = config
        self.schedule = schedule
        self._max_staleness = max_staleness
        window = config.grpo.window
        if window - 1 > max_staleness:
            raise ConfigError(
                f"A generation batch is used for {window} optimizer steps, so its last one is {window - 1} "
                f"behind the version that sampled it; the bound on staleness is {max_staleness}.",
                remedy=f"Set rollout.max_staleness to {window - 1} or more, or reuse batches less.",
            )
        self.depth = config.grpo.lookahead(max_staleness)
        """Generation batches that are sampled ahead of the one that trains."""
        self._ahead: deque[Ahead] = deque()
        self._next = 0
        self._answered_at = 0.0
        self._in_use_from: int | None = None
        self.calls = 0
        self.batches: list[Batch] = []
        """What the calls for TRL brought; whoever reports a step takes them out."""
        self.observer: Observer | None = None

    def __call__(self, prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        """TRL's rollout_func: one completion a row. prompts: one a row, each repeated in a run for its group.

        Called once a generation batch, by every rank with its own rows; a run may be part of a group. Raises
        StaleVersion when the server sampled with a version that is too old, SyncMismatch when TRL asks for other
        prompts than were sampled ahead, and the server's errors.
        """
        with self.sampler.turns.servers():
            return self._batch(prompts, trainer.state.global_step)

    def in_use(self, step: int) -> bool:
        """Whether optimizer step `step`, counted from 0, trains on a batch that is here already."""
        return self._in_use_from is not None and step - self._in_use_from < self._config.grpo.window

    def give_up(self) -> None:
        """Nobody will train on what is still being sampled, and whoever trains next begins anew."""
        while self._ahead:
            self._ahead.popleft().asked.give_up()
        self._next = 0

    def _batch(self, prompts: list[Prompt], step: int) -> dict[str, list[Any]]:
        started, observer = time.perf_counter(), self.observer
        if observer:
            observer.asking(step)
        self._look_ahead(prompts, step)
        if observer:
            observer.asked()
        ahead = self._ahead.popleft()
        if ahead.prompts != prompts:
            self.give_up()
            raise SyncMismatch(
                f"The trainer asks for other prompts in optimizer step {step + 1} than the run's order has there.",
                why="This release of TRL reads the data in another order.",
                remedy="Install the pinned versions with scripts/setup_envs.sh, or set rollout.max_staleness so that "
                "nothing is sampled ahead.",
            )
        rows = [sample for group in self.sampler.samples(ahead.asked) for sample in group]
        for sample in rows:
            if not ahead.oldest <= sample.version <= step:
                raise StaleVersion(
                    f"Optimizer step {step + 1} got a completion of adapter version {sample.version}; "
                    f"versions {ahead.oldest} to {step} are what it may train on.",
                    why="The server does not keep to min_version, or another trainer publishes to it.",
                )
        self.calls += 1
        self._in_use_from = step
        self._note(ahead.asked, [sample.version for sample in rows], sum(sum(s.trained) for s in rows), started)
        if observer:
            pairs = zip(ahead.prompt_ids, rows, strict=True)
            observer.answered(step, [(ids, row.token_ids) for ids, row in pairs])
        result: dict[str, list[Any]] = {
            "prompt_ids": ahead.prompt_ids,
            "completion_ids": [sample.token_ids for sample in rows],
            "logprobs": [sample.logprobs for sample in rows],
            "finish_reason": [sample.finish_reason for sample in rows],
        }
        if any(0 in sample.trained for sample in rows):
            result["env_mask"] = [sample.trained for sample in rows]
        return result

    def _look_ahead(self, prompts: list[Prompt], step: int) -> None:
        """Have the wanted batch, and as many of the next ones as may be, sampled under the newest version."""
        if not self._ahead:
            self._next = max(self._next, self.schedule.batch_at(step))
            self._ahead.append(self._ask(self._next, prompts))
        while len(self._ahead) <= self.depth and self._ahead[-1].batch + 1 < self.schedule.batches:
            batch = self._ahead[-1].batch + 1
            self._ahead.append(self._ask(batch, self.schedule.prompts(batch)))
        self._next = self._ahead[0].batch + 1

    def _ask(self, batch: int, prompts: list[Prompt]) -> Ahead:
        grpo = self._config.grpo
        oldest = max(0, self.schedule.last_step(batch) - self._max_staleness)
        sampling = Sampling(
            temperature=grpo.temperature,
            max_tokens=grpo.max_completion_length,
            top_p=grpo.top_p,
            top_k=grpo.top_k,
            min_p=grpo.min_p,
            stop_token_ids=self.sampler.eos_token_ids,
        )
        runs = [(self.sampler.encode(prompt), n) for prompt, n in _runs(prompts, grpo.num_generations)]
        # What was asked before is answered before, so a batch may take as long as all those in front of it.
        deadline_s = self._config.rollout.timeout_s * (1 + len(self._ahead))
        requests = [
            Generate(prompt=pack_ids(ids), n=n, sampling=sampling, min_version=oldest, deadline_s=deadline_s)
            for ids, n in runs
        ]
        prompt_ids = [ids for ids, n in runs for _ in range(n)]
        return Ahead(batch, prompts, prompt_ids, oldest, self.sampler.ask(requests))

    def _note(self, asked: Asked, versions: list[int], tokens: int, started: float) -> None:
        began = max(asked.asked_at, self._answered_at)
        self._answered_at = asked.answered_at
        self.batches.append(
            Batch(
                versions=versions,
                seconds=time.perf_counter() - started,
                tokens=tokens,
                sampling_s=max(0.0, asked.answered_at - began),
            )
        )


def _runs(prompts: Sequence[Prompt], longest: int) -> Iterator[tuple[Prompt, int]]:
    """Runs of equal neighbours as (prompt, length), none above `longest`: a group is one request to the server."""
    start = 0
    for index in range(1, len(prompts) + 1):
        if index == len(prompts) or prompts[index] != prompts[start] or index - start == longest:
            yield prompts[start], index - start
            start = index
