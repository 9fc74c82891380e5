"""The trackers of tracking.report_to as one callback of the trainer: what they get, in which order, and until when."""

import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from bridge.errors import ConfigError
from trainer_env.config import TrainConfig
from trainer_env.runs.records import Evaluation
from trainer_env.runs.report_to import evaluation_figures, filled_in, remedy, variables, wandb_run
from trainer_env.runs.tracking import Tracker

log = logging.getLogger(__name__)


class Reporters(TrainerCallback):
    """Holds transformers' callbacks for trackers, in place of the trainer.

    They are told after `StepReport`, which adds Tandem's figures to TRL's, and they are closed when the run ends rather
    than when training does, since the last evaluation comes in between. One that fails on the way is left out, and the
    run goes on.
    """

    def __init__(self, config: TrainConfig, tracker: Tracker | None) -> None:
        self._config = config
        self._names = config.tracking.report_to
        self._variables = variables(config)
        self._tracker = tracker
        self._callbacks: dict[str, TrainerCallback] = {}
        self._last: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def take_from(self, trainer: Any) -> None:
        """Be told in place of the trainer's own trackers, after all its other callbacks."""
        for name, kind in zip(self._names, get_reporting_integration_callbacks(list(self._names)), strict=True):
            self._callbacks[name] = trainer.pop_callback(kind)
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Start them, and tell them of the evaluation before training. Raises ConfigError for one that does not."""
        self._last = (args, state, control), rest
        for name, callback in self._callbacks.items():
            try:
                with filled_in(self._variables):
                    if name == "wandb" and state.is_world_process_zero:
                        self._open_wandb(args)
                    callback.on_train_begin(args, state, control, **rest)
            except Exception as error:
                raise ConfigError(
                    f"tracking.report_to: {name} does not start.",
                    why=f"{type(error).__name__}: {error}",
                    remedy=remedy(name),
                ) from error
            if state.is_world_process_zero and (where := self._where(name)):
                self._note(f"{name}: {where}")
        if self._tracker:
            self._tracker.report_to(self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """TRL's figures of a step, with Tandem's in them. A None says that a figure does not apply."""
        self._last = (args, state, control), rest
        self._tell("on_log", logs={name: value for name, value in (logs or {}).items() if value is not None})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Some keep checkpoints, when told to by their own variables."""
        self._last = (args, state, control), rest
        self._tell("on_save")

    def evaluation(self, record: Evaluation) -> None:
        """Held-out figures, at the step that training has come to."""
        self._tell("on_log", logs=evaluation_figures(record))

    def close(self) -> None:
        """Let them finish what they keep or send. No more is told to them."""
        if self._last[0]:
            self._tell("on_train_end")
            if "wandb" in self._callbacks:
                self._try("wandb", import_module("wandb").finish)  # Its callback leaves the run open, for the next one.
        self._callbacks = {}

    def _open_wandb(self, args: TrainingArguments) -> None:
        """Go on with this run's, which the callback then finds open; left to itself it starts a new one each time."""
        wandb = import_module("wandb")
        if wandb.run is None:
            project, folder = os.environ["WANDB_PROJECT"], os.environ["WANDB_DIR"]
            wandb.init(project=project, name=args.run_name, dir=folder, **wandb_run(self._config))

    def _tell(self, event: str, **what: Any) -> None:
        positional, rest = self._last
        for name, callback in list(self._callbacks.items()):
            self._try(name, partial(getattr(callback, event), *positional, **{**rest, **what}))

    def _try(self, name: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            log.exception("the tracker %s failed, and is told no more", name)
            self._note(f"the tracker {name} failed, and is told no more; trainer.log says why")
            del self._callbacks[name]

    def _note(self, text: str) -> None:
        if self._tracker:
            self._tracker.note(text)

    def _where(self, name: str) -> str:
        """Where people look at what a tracker gets; empty when that is not known."""
        if name == "tensorboard":
            folder = os.environ.get("TENSORBOARD_LOGGING_DIR", self._variables["TENSORBOARD_LOGGING_DIR"])
            return f"{Path(sys.prefix) / 'bin' / 'tensorboard'} --logdir {folder}"
        if name == "wandb":
            run = import_module("wandb").run
            return (run.url or f"wandb sync {Path(run.dir).parent}") if run else ""
        return "trackio show" if name == "trackio" else ""
