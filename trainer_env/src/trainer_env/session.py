"""A run from start to end: the server it samples from, the policy it trains, and the order in which things happen."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event
from typing import Any, Self

from bridge import protocol as p
from bridge.endpoint import for_people
from bridge.errors import PeerDied
from trainer_env import data, models, ranks, rewards
from trainer_env.config import TrainConfig, to_toml
from trainer_env.evaluation import evaluate
from trainer_env.jsonl import write_atomically
from trainer_env.ordering import Schedule
from trainer_env.placement import Placement
from trainer_env.quiet import prints_to
from trainer_env.records import Phase, Summary
from trainer_env.rollouts import Rollouts
from trainer_env.run_folder import RunLock, needing_room, step_to_resume
from trainer_env.sampler import Sampler
from trainer_env.server import Server
from trainer_env.server_process import versions
from trainer_env.serving import Serving
from trainer_env.tracking import Tracker
from trainer_env.turns import SLEEP, Turns


class Session:
    """One run: `with Session(config, placement) as session: session.start(); session.run()`.

    Data and rewards are read here, so that what is wrong with them is said before anything starts. Raises ConfigError.
    A server that the run's last trainer or kernel has left is gone on with when its settings are the same.
    source: what errors call the config. resume: go on from the run's last checkpoint.
    """

    def __init__(
        self, config: TrainConfig, placement: Placement, *, source: str = "the config", resume: bool = False
    ) -> None:
        self.config = config
        self.placement = placement
        self.stop = Event()
        """Set it, and the optimizer step that is being taken is the last; a checkpoint is written."""
        self._source = source
        self._resume = resume
        self._rewards = rewards.load(config.rewards)
        self._data = data.load(config.data, config.seed)
        self._model = ""
        self._serving = Serving(config, placement, say=self._say)
        self._policy: Any = None
        self._rollouts: Rollouts | None = None
        self._tracker: Tracker | None = None
        self._lock: RunLock | None = None
        self._training = False
        self._interrupts = 0
        self._ending = False
        self._killing = False

    def describe(self) -> list[str]:
        """The run in a few lines, for people: what trains on what, and in which versions."""
        grpo, held_out = self.config.grpo, len(self._data.evaluation)
        groups = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps // grpo.num_generations
        return [
            f"run        {self.config.run_dir}" + (" (resumed)" if self._resume else ""),
            f"model      {self.config.model.name}, {self.config.model.dtype}, LoRA rank {self.config.lora.r}",
            f"data       {self.config.data.source}: {len(self._data.train)} to train on, {held_out} held out",
            f"steps      {grpo.max_steps} of {groups} prompts x {grpo.num_generations} completions",
            f"server     {self._serving.versions()}",
            f"trainer    {versions('unsloth', 'trl', 'peft', 'transformers', 'torch')}",
        ]

    def check(self) -> str:
        """Have the server half check its part; the engine's command line. Starts nothing. Raises ConfigError."""
        return self._serving.check(self._source)

    def start(self) -> None:
        """Check what can be checked, then start the server, or take it over: its engine loads while the trainer does.

        Raises ConfigError, and leaves everything as it was, when the server half refuses its settings, there is no such
        model, a run is here already, or there is none to resume.
        """
        run_dir = self.config.run_dir
        step_to_resume(self.config, resume=self._resume)
        self.check()
        self._model = models.resolve(self.config.model.name)
        with needing_room(self.config):
            self._lock = RunLock(self.config)
            write_atomically(run_dir / "config.toml", to_toml(self.config).encode())
            write_atomically(run_dir / "placement.json", self.placement.to_json())
            self._serving.start(self._model, anew=not self._resume)

    def run(self) -> Summary:
        """The whole story: load, connect, evaluate, train, evaluate, sum up."""
        self.load_policy()
        self.connect()
        if self.config.evaluation.before and not self._resume:
            self.evaluate("eval_before", step=0)
        outcome = self.train()
        if self.config.evaluation.after and outcome.finished:
            self.evaluate("eval_after", step=outcome.step)
        with self._phase():
            restarts = self._serving.restarts()
        with needing_room(self.config):
            return self.tracker.finish(
                backend=self.config.backend,
                placement=self.placement.mode,
                adapter=outcome.adapter,
                restarts=restarts,
            )

    def interrupt(self) -> None:
        """What Ctrl-C means: while training, that this step is the last; at any other time and twice, the end now.

        Raises KeyboardInterrupt, unless the step is to be taken or everything is being killed already.
        """
        self._interrupts += 1
        if self._training and self._interrupts == 1:
            self.stop.set()
            self.tracker.status("stopping after this step; once more to stop now")
        elif not self._killing:
            self._ending = True
            raise KeyboardInterrupt

    @property
    def tracker(self) -> Tracker:
        """Where figures go; opened when first asked for."""
        if self._tracker is None:
            self._tracker = Tracker(
                self.config.run_dir,
                self.config.grpo.max_steps,
                display=self.config.tracking.display,
                samples_per_step=self.config.tracking.samples_per_step,
                resume_step=step_to_resume(self.config, resume=self._resume),
            )
        return self._tracker

    def load_policy(self) -> None:
        """Load the base model under a fresh adapter."""
        os.environ.update(self.placement.trainer_environment())  # Read by torch and CUDA as they are imported.
        with self._phase(), self._timed("the trainer's model is loaded"), self._quietly():
            from trainer_env import grpo

            self._policy = grpo.load_policy(self.config, self._model)

    def connect(self) -> None:
        """Wait until the engine has answered, take the server's lease, see that every prompt fits."""
        with self._phase(), self._timed("the server answers"):
            client = self._serving.connect()
        welcome = client.welcome
        for line in for_people(welcome.http_url, welcome.metrics_url):
            self.tracker.note(line)
        sampler = Sampler(
            client,
            self._policy.tokenizer,
            self.config,
            eos_token_ids=self._policy.eos_token_ids,
            turns=self._turns(client),
        )
        for example in (*self._data.train, *self._data.evaluation):
            sampler.encode(example.prompt)
        ranks.join(on_gpu=self.placement.mode != "cpu")
        ranks.word_of_the_first(welcome.server_uuid)
        self._rollouts = Rollouts(
            sampler,
            self.config,
            Schedule(self.config, self._data.train, ranks=ranks.count()),
            max_staleness=self.config.max_staleness(self.placement.mode),
        )

    def evaluate(self, phase: Phase, step: int) -> None:
        """Answer the held-out examples under adapter version `step`, and record it."""
        assert self._rollouts, "connect first"
        if not self._data.evaluation:
            return
        with self._phase(), needing_room(self.config):
            self.tracker.status(f"evaluating on {len(self._data.evaluation)} held-out examples")
            started = time.monotonic()
            with self._quietly():
                samples = evaluate(
                    self._rollouts.sampler,
                    self._data.evaluation,
                    self._rewards,
                    self.config.evaluation,
                    phase=phase,
                    step=step,
                )
            self._rollouts.sampler.turns.take()  # No part of a step.
            self.tracker.evaluation(phase, step, samples, time.monotonic() - started)

    def train(self) -> Any:
        """Train to grpo.max_steps; a `grpo.Outcome`. Raises what the server, a reward or the trainer raises."""
        from trainer_env import grpo
        from trainer_env.publisher import Publisher

        assert self._rollouts, "connect first"
        rollout = self.config.rollout
        publisher = Publisher(self._serving.client, timeout_s=rollout.publish_timeout_s, dtype=rollout.publish_dtype)
        with self._phase(), needing_room(self.config), self._quietly(), self._stoppable():
            return grpo.run(
                self._policy,
                self.config,
                rewards=self._rewards,
                rollouts=self._rollouts,
                publisher=publisher,
                tracker=self.tracker,
                resume=self._resume,
                after_step=self._after_step,
                stop=self.stop,
            )

    def status(self) -> p.ServerStatus:
        """What the server says of itself."""
        with self._phase():
            return self._serving.client.ask(p.Status())

    def close(self, *, now: bool = False, keep_server: bool = False) -> None:
        """End the server and its engine, whatever state they are in. now: kill rather than ask.

        keep_server: leave them running instead, for server.keep_server_s; the next session of this run goes on with
        them. Raises ConfigError, and closes nothing, when that is 0. Interrupted, it may be called again.
        """
        self._killing = now
        if keep_server:
            self._serving.keep()
        try:
            self._serving.close(now=now)
        finally:
            tracker, self._tracker = self._tracker, None
            if tracker:
                tracker.close()
            lock, self._lock = self._lock, None
            if lock:
                lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close(now=self._interrupts > 1)
        except KeyboardInterrupt:  # No more asking.
            self.close(now=True)
            raise

    def _after_step(self, step: int) -> None:
        every = self.config.evaluation.every
        if every and step % every == 0 and step < self.config.grpo.max_steps:
            self.evaluate("eval", step)

    @contextmanager
    def _phase(self) -> Iterator[None]:
        """A part of the run that needs the server: if that is gone, say why.

        Libraries catch a KeyboardInterrupt, go on, or make another error of it: here it is one again.
        """
        try:
            yield
        except Exception as error:
            if self._ending:
                raise KeyboardInterrupt from error
            if isinstance(error, PeerDied) and (died := self._serving.died()):
                raise died from None
            raise
        if self._ending:
            raise KeyboardInterrupt

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """A Ctrl-C in here lets the step end."""
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def _turns(self, client: Server) -> Turns:
        """In time-share the halves take turns on their GPU, if the engine can sleep."""
        if self.placement.mode != "time-share":
            return Turns()
        if SLEEP not in client.welcome.capabilities:
            self.tracker.note("the engine cannot sleep: both halves keep their GPU memory")
            return Turns()
        from trainer_env.grpo import release_gpu_memory

        return Turns(client, release=release_gpu_memory)

    def _say(self, text: str) -> None:
        self.tracker.status(text)

    def _quietly(self) -> AbstractContextManager[None]:
        """What libraries print goes to trainer.log; the display keeps the terminal."""
        return prints_to(self.config.run_dir / "trainer.log")

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.tracker.status(f"{what} ({time.monotonic() - started:.0f} s)")
