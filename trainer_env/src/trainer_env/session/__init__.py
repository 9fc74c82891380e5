"""The door to a run: what a command line, a notebook or a script does with one."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bridge import protocol as p
from bridge.endpoint import for_people
from bridge.errors import BridgeError, ConfigError
from trainer_env import data, models, rewards
from trainer_env.config import TrainConfig, changed, to_toml
from trainer_env.evaluation import Answered
from trainer_env.models.hub import without_statistics
from trainer_env.models.layers import require_stored_layers
from trainer_env.models.precision import remark, settled
from trainer_env.placement import Placement
from trainer_env.publishing.saved_adapter import in_the_way
from trainer_env.rewards.columns_check import check_columns
from trainer_env.runs.checkpoints import checkpoint_to_resume, last_checkpoint, step_of
from trainer_env.runs.environment_record import write_environment
from trainer_env.runs.finding import RUNS, find_run
from trainer_env.runs.jsonl import write_atomically
from trainer_env.runs.records import Summary
from trainer_env.runs.report_to import require_packages
from trainer_env.runs.run_folder import RunLock, needing_room, step_to_resume
from trainer_env.runs.run_reader import RunFiles, read_run
from trainer_env.sampling.prompts import fitting_early
from trainer_env.serving import Serving
from trainer_env.serving.server import Server
from trainer_env.serving.server_process import versions
from trainer_env.serving.turns import Turns
from trainer_env.session import opening
from trainer_env.session.asking import Asking
from trainer_env.session.completing import Prompts, Version
from trainer_env.session.screen import Screen
from trainer_env.training import Training, phase, timed, turns
from trainer_env.training.interrupts import Interrupts
from trainer_env.training.memory import letting_go

if TYPE_CHECKING:
    from trainer_env.exporting import Exported, What
    from trainer_env.session.async_session import AsyncSession

TRAINING_ENDS_S = 60.0
"""For a training in another thread to notice that its session is closed."""


class Session:
    """One run, from Python. In a notebook or a script:

        with Session.open("configs/demo.toml", "grpo.max_steps=12", run="adding") as session:
            session.train()
            print(session.generate("What is 2+3? Answer with just the number.")[0])

    The command line makes its own: `with Session(config, placement) as session: session.start(); session.train()`.

    Data and rewards are read here, so that what is wrong with them is said before anything starts. Raises ConfigError.
    A server that the run's last trainer or kernel has left is gone on with when its settings are the same.
    source: what errors call the config. resume: go on from the run's last checkpoint. by_hand: somebody looks and asks
    first, and may train later; until then nothing is changed of what a run that has begun has recorded.
    """

    def __init__(
        self,
        config: TrainConfig,
        placement: Placement,
        *,
        source: str = "the config",
        resume: bool = False,
        by_hand: bool = False,
    ) -> None:
        without_statistics()
        self.config = config = settled(config, placement)
        self.placement = placement
        self._source = source
        self._resume = resume
        self._by_hand = by_hand
        require_packages(config.tracking.report_to)
        self._rewards = rewards.load(config.rewards)
        self._data = data.load(config.data, config.seed)
        check_columns(config.rewards, self._rewards, self._data)
        self._screen = Screen(lambda: self.config, by_hand=by_hand)
        self._interrupts = Interrupts(say=self._screen.say)
        self._serving = Serving(config, placement, say=self._screen.say)
        self._model = ""
        self.left_out = ""
        """How many examples `check` has left out for their long prompts, for people; empty: none."""
        self._asking: Asking | None = None
        self._lock: RunLock | None = None
        self._connecting = threading.RLock()
        self._training = threading.Lock()
        self._trainer = 0
        """The thread that trains, while there is one."""
        self._closing = False

    @classmethod
    def open(
        cls, config: str | Path | TrainConfig | None = None, *overrides: str, run: str = "", output_dir: str = ""
    ) -> Self:
        """A new run, or the one of that name: its server if that still lives, its last checkpoint. Returns at once; the
        server starts meanwhile.

        config: a TOML file or a TrainConfig; default: the demo. overrides: `key=value`, as after --set. run: its name;
        default: the config's name and the time. A run that exists goes by its own config and the overrides.
        Raises ConfigError.
        """
        return opening.opened(cls, config, overrides, run=run, output_dir=output_dir)

    @classmethod
    def attach(cls, run: str, *overrides: str, output_dir: str = str(RUNS)) -> Self:
        """A run that exists, as `open` gives it. Raises ConfigError, with the nearest name, when there is none."""
        folder = find_run(run, Path(output_dir)).resolve()
        return cls.open(None, *overrides, run=folder.name, output_dir=str(folder.parent))

    @property
    def aio(self) -> "AsyncSession":
        """The same, to be awaited."""
        from trainer_env.session.async_session import AsyncSession

        return AsyncSession(self)

    def describe(self) -> list[str]:
        """The run in a few lines, for people: what trains on what, and in which versions."""
        grpo, held_out = self.config.grpo, len(self._data.evaluation)
        dtype = f"{self.config.model.dtype}{remark(self.config, self.placement)}"
        completions = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps * self.placement.ranks
        prompts = completions / grpo.num_generations  # A step may use a part of a group, and the next one the rest.
        return [
            f"run        {self.config.run_dir}" + (" (resumed)" if self._resume else ""),
            f"model      {self.config.model.name}, LoRA rank {self.config.lora.r}, {dtype}",
            f"data       {self.config.data.source}: {len(self._data.train)} to train on, {held_out} held out",
            f"steps      {grpo.max_steps} of {prompts:g} prompts x {grpo.num_generations} completions",
            f"server     {self._serving.versions()}",
            f"trainer    {versions('unsloth', 'trl', 'peft', 'transformers', 'torch')}",
        ]

    def __str__(self) -> str:
        return "\n".join([*self.describe(), *self.placement.lines()])

    def check(self) -> str:
        """Have the server half check its part, then find the model, its layers that get an adapter, and prompts that
        leave no room for a completion.

        Returns the engine's command line. Starts nothing. Raises ConfigError.
        """
        command = self._serving.check(self._source)
        self._model = models.resolve(self.config.model.name)
        require_stored_layers(self.config.lora, self._model, self.config.model.name)
        found = fitting_early(self.config, self._data, self._model)
        self._data, self.left_out = found.data, found.remark(self.config) or self.left_out
        return command

    def start(self) -> None:
        """Check what can be checked, then start the server, or take it over: its engine loads while the trainer does.

        Raises ConfigError, and leaves everything as it was, when the server half refuses its settings, there is no such
        model, a run is here already, or there is none to resume.
        """
        run_dir = self.config.run_dir
        if not self._by_hand:
            step_to_resume(self.config, resume=self._resume)
        if not self._model:  # Else it has been checked already.
            self.check()
        if self.left_out:
            self._screen.display.note(self.left_out)
        with needing_room(self.config):
            self._lock = RunLock(self.config)
            if not (self._by_hand and (run_dir / "config.toml").is_file() and opening.has_begun(run_dir)):
                self._write_config()
            self._serving.start(self._model, anew=not (self._resume or self._by_hand))

    # ---- asking ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompts,
        *,
        n: int = 1,
        temperature: float | None = None,
        max_tokens: int | None = None,
        version: Version = "latest",
    ) -> Any:
        """Completions of a prompt: a list of n `Completion`. Of a list of prompts: a list of such lists.

        prompts: text, which becomes a user's turn behind the run's system prompt, or messages; plain text where
        data.chat is false. temperature: default: the run's; 0 is greedy. max_tokens: default: the run's. version: of
        the adapter: "latest", "base" for the model without one, or a number. Raises what the server answers.
        """
        asking = self._asking_now()
        with phase(self._serving, self._interrupts):
            return asking.generate(
                prompts,
                n=n,
                temperature=temperature,
                max_tokens=max_tokens,
                version=version,
                may_come=self._training.locked(),
            )

    def evaluate(
        self,
        *,
        version: Version = "latest",
        n: int | None = None,
        temperature: float | None = None,
        max_examples: int | None = None,
    ) -> Answered:
        """The held-out examples, answered n times each by one version and scored; nothing of it is recorded.

        What is left out is as `[evaluation]` says. `Answered` has reward_mean, pass_at and the samples. Raises what the
        server answers, RewardError, and ConfigError when nothing is held out, or n greedy answers would be alike.
        """
        asking = self._asking_now()
        with phase(self._serving, self._interrupts):
            return asking.evaluate(
                self._data.evaluation,
                self._rewards,
                version=version,
                n=n,
                temperature=temperature,
                max_examples=max_examples,
                may_come=self._training.locked(),
            )

    def status(self) -> p.ServerStatus:
        """What the server says of itself: engine, newest version, what it is working on, restarts."""
        client = self._connected()
        with phase(self._serving, self._interrupts):
            return client.ask(p.Status())

    @property
    def history(self) -> RunFiles:
        """What the run has recorded so far: steps, samples, evaluations, and the summary of one that has ended."""
        return read_run(self.config.run_dir)

    def report(self, *others: str | Path) -> Path:
        """Write the run's report, with other runs (names or folders) beside it; where it is. Raises ConfigError."""
        from trainer_env.report import write_report

        output_dir = Path(self.config.output_dir)
        return write_report([self.config.run_dir, *(find_run(str(other), output_dir) for other in others)])

    # ---- training ----------------------------------------------------------------------------------------------------

    def train(self, steps: int | None = None, *, stop: threading.Event | None = None) -> Summary:
        """The whole story: load, connect, evaluate, train, evaluate, sum up.

        steps: optimizer steps of the run in all; default: grpo.max_steps. A run that was trained before goes on from
        its last checkpoint. Ctrl-C ends it after the step that is being taken, and leaves the server; another one ends
        it at once, and raises KeyboardInterrupt. stop: set in another thread, it means what the first Ctrl-C means.
        Raises what the server, a reward or the trainer raises, and ConfigError when the run cannot go on.
        """
        if not self._training.acquire(blocking=False):
            raise ConfigError(f"Run {self.config.run!r} is being trained already.", remedy="Wait, or interrupt it.")
        try:
            self._trainer = threading.get_ident()
            self._interrupts.stop = stop or threading.Event()
            with self._interrupts.heeded():
                return self._trained(steps)
        except BridgeError as error:
            if self._closing:
                raise self._is_closed("This session was closed while it trained.") from error
            raise
        finally:
            if self._by_hand:  # Otherwise the end of the training is the end of it all.
                self._interrupts.forget()
            self._training.release()

    def _trained(self, steps: int | None) -> Summary:
        if self._by_hand:
            opening.require_one_process(self.placement, self._source)
        self._require_open()
        config = self.config if steps is None else changed(self.config, [f"grpo.max_steps={steps}"], "train")
        if self._by_hand:
            self._go_on(config)
        self.config = config
        training = Training(
            config=self.config,
            placement=self.placement,
            data=self._data,
            rewards=self._rewards,
            model=self._model,
            serving=self._serving,
            connected=self._connected,
            interrupts=self._interrupts,
            display=self._screen.display,
            resume=self._resume,
        )
        try:
            with letting_go():
                return training.run()
        finally:
            self._screen.close()

    def _go_on(self, config: TrainConfig) -> None:
        """A run that is opened by hand goes on from where it is; a server that is ahead of that begins anew, and where
        there is nothing to go on from, another one does.
        """
        done, checkpoints = self.history.steps, config.run_dir / "checkpoints"
        if done and config.grpo.max_steps < done[-1].step:
            raise ConfigError(
                f"Run {config.run!r} has taken {done[-1].step} optimizer steps, and is to have "
                f"{config.grpo.max_steps} in all.",
                remedy="Give the number of all its steps, not of those to come.",
            )
        self._resume = bool(done) or last_checkpoint(checkpoints) is not None
        status = self.status() if self._serving.connected else None
        if not self._resume:
            with self._connecting:
                self._serving.begin(status.version if status else 0)
        elif status and in_the_way(status, config.run_dir, step_of(checkpoint_to_resume(checkpoints))):
            with self._connecting:
                self._asking = None
                self._serving.begin_anew()
        self.config = config
        self._write_config()
        self._screen.open_for_training()

    def export(
        self, out: str | Path, *, what: "What" = "adapter", which: str | int = "last", force: bool = False
    ) -> "Exported":
        """Write what the run made into a folder for others; see `exporting.export`. Raises ConfigError, BridgeError."""
        from trainer_env.exporting import export

        return export(self.config.run_dir, Path(out), what=what, which=which, force=force)

    def interrupt(self) -> None:
        """What Ctrl-C means: while training, that this step is the last; at any other time and twice, the end now.

        Raises KeyboardInterrupt, unless the step is to be taken or everything is being killed already.
        """
        self._interrupts.interrupt()

    def end_step(self) -> None:
        """Let a training that runs in another thread end after the step that it is taking."""
        self._interrupts.stop.set()

    def close(self, *, now: bool = False, keep_server: bool = False) -> None:
        """End the server and its engine, whatever state they are in. now: kill rather than ask.

        keep_server: leave them running instead, for server.keep_server_s; the next session of this run goes on with
        them. Raises ConfigError, and closes nothing, when that is 0. Interrupted, it may be called again. A training in
        another thread ends with ConfigError, and is waited for.
        """
        if keep_server:
            self._serving.require_keepable()
        self._interrupts.killing, self._closing = now, True
        if self._training.locked():
            self.end_step()
        if keep_server:
            self._serving.keep()
        try:
            self._serving.close(now=now)
        finally:
            self._asking = None
            try:
                self._wait_for_training()
            finally:
                self._screen.close()
                lock, self._lock = self._lock, None
                if lock:
                    lock.release()

    @property
    def is_open(self) -> bool:
        """Whether it holds its run: from `start` to `close`."""
        return self._lock is not None

    def make_way(self) -> None:
        """Let another session of this run have the server: a cell was run again. Raises ConfigError while it trains."""
        if self._training.locked():
            raise ConfigError(
                f"Run {self.config.run!r} is being trained in this process.", remedy="Wait for it, or interrupt it."
            )
        self.close(keep_server=bool(self.config.server.get("keep_server_s")) and self._lock is not None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close(now=self._interrupts.impatient)
        except KeyboardInterrupt:  # No more asking.
            self.close(now=True)
            raise

    # ---- what these are made of --------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._lock is None:
            raise self._is_closed("This session is closed.")

    def _is_closed(self, what: str) -> ConfigError:
        return ConfigError(what, remedy=f"Session.attach({self.config.run!r}) opens the run again.")

    def _wait_for_training(self) -> None:
        """The run is nobody else's before its trainer has let go of it."""
        if self._trainer != threading.get_ident() and self._training.acquire(timeout=TRAINING_ENDS_S):
            self._training.release()

    def _write_config(self) -> None:
        """The run as it is trained, in its folder."""
        write_atomically(self.config.run_dir / "config.toml", to_toml(self.config).encode())
        write_atomically(self.config.run_dir / "placement.json", self.placement.to_json())
        write_environment(self.config.run_dir, self.placement, self._serving.versions())

    def _connected(self) -> Server:
        """The server, once its engine has answered and its lease is ours."""
        with self._connecting:
            self._require_open()
            return self._serving.client if self._asking and self._serving.connected else self._connect()

    def _connect(self) -> Server:
        with phase(self._serving, self._interrupts), timed("the server answers", self._screen.display):
            client = self._serving.connect()
        ours = turns(self.placement, client, self._screen.display)
        self._asking = Asking(client, self._model, self.config, ours, self._held_anew)
        for line in for_people(client.welcome.http_url, client.welcome.metrics_url):
            self._screen.display.note(line)
        return client

    def _held_anew(self) -> tuple[Server, Turns]:
        """The server under another epoch. Raises what keeps it from answering; `_connected` goes on from there."""
        with self._connecting:
            client = self._serving.begin_anew()
            return client, turns(self.placement, client, self._screen.display)

    def _asking_now(self) -> Asking:
        if self.placement.mode == "time-share" and self._training.locked():
            raise ConfigError(
                "The halves take turns on this GPU, and it is the trainer's.", remedy="Ask when it has trained."
            )
        self._connected()
        assert self._asking
        return self._asking
