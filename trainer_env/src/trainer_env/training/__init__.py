"""A run's training from beginning to end: load, connect, evaluate, train, evaluate, sum up."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import PeerDied
from trainer_env import ranks
from trainer_env.config import TrainConfig
from trainer_env.data import Data
from trainer_env.data.ordering import Schedule
from trainer_env.devices import confine
from trainer_env.display import Display
from trainer_env.display.quiet import prints_to
from trainer_env.evaluation.run_evaluation import evaluate_run
from trainer_env.placement import Placement
from trainer_env.rewards import Reward
from trainer_env.runs.records import Phase, Summary
from trainer_env.runs.run_folder import needing_room, step_to_resume
from trainer_env.runs.tracking import Tracker
from trainer_env.sampling.prompts import fitting
from trainer_env.sampling.rollouts import Rollouts
from trainer_env.sampling.sampler import Sampler
from trainer_env.serving import Serving
from trainer_env.serving.held_signals import held_signals
from trainer_env.serving.server import Server
from trainer_env.serving.turns import SLEEP, Turns, release_gpu_memory, sleep_first
from trainer_env.training.interrupts import Interrupts


@dataclass(frozen=True)
class Training:
    """What a training is made of. model: what `models.resolve` returned. resume: go on from the last checkpoint.

    connected: waits for the server, and gives who to ask.
    """

    config: TrainConfig
    placement: Placement
    data: Data
    rewards: Sequence[Reward]
    model: str
    serving: Serving
    connected: Callable[[], Server]
    interrupts: Interrupts
    display: Display
    resume: bool

    def run(self) -> Summary:
        """Train to grpo.max_steps, or to the step at which somebody interrupts.

        Raises what the server, a reward or the trainer raises, and ConfigError when the run cannot begin or go on.
        """
        tracker = self._tracker()
        try:
            if self.placement.mode in ("shared", "time-share"):
                self._engine_first()
            policy = self._load_policy()
            return replace(self, data=self._fitting_data(policy))._run(tracker, policy)  # noqa: SLF001 (its own)
        finally:
            tracker.close()

    def _run(self, tracker: Tracker, policy: Any) -> Summary:
        rollouts = self._rollouts(self.connected(), policy)
        stop = self.interrupts.stop  # Somebody may have ended it while it loaded.
        if self.config.evaluation.before and not self.resume and not stop.is_set():
            self._evaluate(tracker, rollouts, policy, "eval_before", 0)
        outcome = self._train(tracker, rollouts, policy)
        if self.config.evaluation.after and (outcome.finished or tracker.held_out.enough):
            self._evaluate(tracker, rollouts, policy, "eval_after", outcome.step)
        with self._phase():
            restarts = self.serving.restarts()
        with needing_room(self.config):
            return tracker.finish(
                backend=self.config.backend,
                placement=self.placement.mode,
                adapter=outcome.adapter,
                restarts=restarts,
            )

    def _tracker(self) -> Tracker:
        return Tracker(
            self.config.run_dir,
            self.config.grpo.max_steps,
            display=self.display,
            samples_per_step=self.config.tracking.samples_per_step,
            resume_step=step_to_resume(self.config, resume=self.resume),
            evaluation=self.config.evaluation,
        )

    def _engine_first(self) -> None:
        """An engine that starts counts what somebody else loads on its GPU meanwhile as its own, and has too little.

        Libraries take nothing of it but CUDA's own memory, and as long to import as a small model takes to load.
        """
        with self._phase(), timed("the trainer's libraries are imported", self.display), self._quietly():
            self._libraries()
        server = self.connected()
        if self.placement.mode == "time-share":
            with self._phase():
                sleep_first(server)

    def _load_policy(self) -> Any:
        """The base model under a fresh adapter: a `grpo.Policy`."""
        with self._phase(), timed("the trainer's model is loaded", self.display), self._quietly():
            return self._libraries().load_policy(self.config, self.model)

    def _libraries(self) -> Any:
        """The module `grpo`, and the libraries that it goes by, which see the trainer's devices alone."""
        confine(self.placement.trainer_environment())
        with held_signals():  # A library whose import was broken off cannot be imported again in this process.
            from trainer_env.training import grpo

            grpo.import_unsloth()
            return grpo

    def _fitting_data(self, policy: Any) -> Data:
        """By the tokenizer that trains: without a file for a light one, the session has not looked."""
        found = fitting(self.config, self.data, policy.tokenizer)
        if found.left_out:
            self.display.note(found.remark(self.config))
        return found.data

    def _rollouts(self, server: Server, policy: Any) -> Rollouts:
        """How training asks. Raises ConfigError for a prompt that does not fit the engine."""
        sampler = Sampler(
            server,
            policy.tokenizer,
            self.config,
            eos_token_ids=policy.eos_token_ids,
            turns=turns(self.placement, server, self.display),
        )
        if server.welcome.limits.max_context < self.config.model.max_seq_length:  # It has a limit of its own.
            for example in (*self.data.train, *self.data.evaluation):
                sampler.encode(example.prompt)
        ranks.join(on_gpu=self.placement.mode != "cpu")
        ranks.word_of_the_first(server.welcome.server_uuid)
        return Rollouts(
            sampler,
            self.config,
            Schedule(self.config, self.data.train, ranks=ranks.count()),
            max_staleness=self.config.max_staleness(self.placement.mode),
        )

    def _evaluate(self, tracker: Tracker, rollouts: Rollouts, policy: Any, phase: Phase, step: int) -> None:
        """Answer the held-out examples under adapter version `step`, record it, keep its adapter if it is the best."""
        if not self.data.evaluation:
            return
        with self._phase(), needing_room(self.config), self._quietly():
            evaluate_run(
                self.config,
                sampler=rollouts.sampler,
                examples=self.data.evaluation,
                rewards=self.rewards,
                tracker=tracker,
                model=policy.model,
                phase=phase,
                step=step,
            )

    def _train(self, tracker: Tracker, rollouts: Rollouts, policy: Any) -> Any:
        """Train to grpo.max_steps; a `grpo.Outcome`."""
        from trainer_env.publishing.publisher import Publisher
        from trainer_env.training import grpo

        every, last = self.config.evaluation.every, self.config.grpo.max_steps

        def after_step(step: int) -> None:
            if every and step % every == 0 and step < last:
                self._evaluate(tracker, rollouts, policy, "eval", step)

        config, stop = self.config, self.interrupts.stop
        publisher = Publisher(
            self.serving.client, timeout_s=config.rollout.publish_timeout_s, dtype=config.publish_dtype
        )
        with self._phase(), needing_room(self.config), self._quietly(), self.interrupts.stoppable():
            return grpo.run(
                policy,
                self.config,
                rewards=self.rewards,
                rollouts=rollouts,
                publisher=publisher,
                tracker=tracker,
                resume=self.resume,
                after_step=after_step,
                enough=lambda: tracker.held_out.enough or stop.is_set(),
                stop=stop,
            )

    def _phase(self) -> AbstractContextManager[None]:
        return phase(self.serving, self.interrupts)

    def _quietly(self) -> AbstractContextManager[None]:
        """What libraries print goes to trainer.log; the display keeps the terminal."""
        return prints_to(self.config.run_dir / "trainer.log")


@contextmanager
def phase(serving: Serving, interrupts: Interrupts) -> Iterator[None]:
    """A part of the run that needs the server: if that is gone, say why.

    Libraries catch a KeyboardInterrupt, go on, or make another error of it: here it is one again.
    """
    try:
        yield
    except Exception as error:
        if interrupts.ending:
            raise KeyboardInterrupt from error
        if isinstance(error, PeerDied) and (died := serving.died()):
            raise died from None
        raise
    if interrupts.ending:
        raise KeyboardInterrupt


def turns(placement: Placement, server: Server, display: Display) -> Turns:
    """In time-share the halves take turns on their GPU, if the engine can sleep."""
    if placement.mode != "time-share":
        return Turns()
    if SLEEP not in server.welcome.capabilities:
        display.note("the engine cannot sleep: both halves keep their GPU memory")
        return Turns()
    return Turns(server, release=release_gpu_memory)


@contextmanager
def timed(what: str, display: Display) -> Iterator[None]:
    """Say afterwards how long something took."""
    started = time.monotonic()
    yield
    display.status(f"{what} ({time.monotonic() - started:.0f} s)")
