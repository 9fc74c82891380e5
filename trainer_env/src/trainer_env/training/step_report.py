"""What happens at the end of an optimizer step: the adapter is published, and the step's figures are recorded."""

import time
from collections.abc import Callable
from threading import Event
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from bridge.errors import SyncMismatch
from trainer_env import ranks
from trainer_env.proof.agreement import Agreement, Figures
from trainer_env.proof.prover import Prover
from trainer_env.publishing.publisher import Publisher
from trainer_env.rewards.scoring import Scoring
from trainer_env.runs.records import StepMetrics
from trainer_env.runs.report_to import step_figures
from trainer_env.runs.tracking import Tracker
from trainer_env.sampling.rollouts import Batch, Rollouts
from trainer_env.training.flat_rewards import FlatRewards


class Enough(Exception):
    """The run had ended before this process went on with it: there is no step to take."""


class StepReport(TrainerCallback):
    """Publishes early, so that the server has the new adapter before it is asked for the next rollout.

    A step's seconds are split into rollout_s, waiting for completions, sleep_s, wake_s, and train_s, all the rest but
    publishing.
    """

    def __init__(
        self,
        *,
        model: Any,
        rollouts: Rollouts,
        publisher: Publisher,
        prover: Prover,
        agreement: Agreement,
        scoring: Scoring,
        tracker: Tracker | None,
        after_step: Callable[[int], None] | None = None,
        enough: Callable[[], bool] | None = None,
        stop: Event | None = None,
    ) -> None:
        self._model = model
        self._rollouts = rollouts
        self._publisher = publisher
        self._prover = prover
        self._agreement = agreement
        self._scoring = scoring
        self._tracker = tracker
        self._after_step = after_step
        self._enough = enough
        self._stop = stop
        self._flat = FlatRewards()
        self._mark = 0.0
        self._step_s = 0.0
        self._carried: dict[str, float] = {}

    def on_train_begin(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """Publish what a resumed run goes on from. Raises Enough."""
        if state.is_world_process_zero and state.global_step:
            self._publish(state.global_step)
        if self._is_enough():
            raise Enough

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock: trackers have started by now."""
        self._mark = time.perf_counter()

    def on_pre_optimizer_step(self, _: Any, state: TrainerState, *__: Any, **___: Any) -> None:
        """A batch whose logprobs show another policy is not learned from."""
        if state.is_world_process_zero:
            self._prover.before_step(self._agreement.figures(), state.global_step)

    def on_step_end(self, _: Any, state: TrainerState, control: TrainerControl, **__: Any) -> TrainerControl:
        """Publish the adapter that this step made; end the run if asked to. The last step is always kept."""
        self._step_s = time.perf_counter() - self._mark
        if self._rollouts.calls == 0:
            raise SyncMismatch(
                "The trainer took an optimizer step without calling rollout_func.",
                why="This release of TRL or Unsloth ignores it, and samples from the training model instead.",
                remedy="Install the pinned versions with scripts/setup_envs.sh.",
            )
        if state.is_world_process_zero:
            self._publish(state.global_step)
        if ranks.any_of(self._stop is not None and self._stop.is_set()):
            control.should_training_stop = True
        # The last step's checkpoint lets a run be made longer.
        control.should_save = control.should_save or control.should_training_stop
        return control

    def on_log(
        self, _: Any, state: TrainerState, control: TrainerControl, logs: dict[str, float], **__: Any
    ) -> TrainerControl:
        """Record the step, now that TRL has its figures; end the run, with a checkpoint, when that was enough.

        Tandem's own figures are added for the trackers, which are told next.

        Called once a step, and once more at the end of training.
        """
        if "learning_rate" not in logs:
            return control
        batches, self._rollouts.batches = self._rollouts.batches, []
        figures = self._agreement.take()
        tokens = int(ranks.total(sum(batch.tokens for batch in batches)))
        sampling_s = ranks.most(sum(batch.sampling_s for batch in batches))
        if self._tracker:
            self._require_change(logs)
            metrics = self._metrics(state.global_step, logs, batches, figures, tokens=tokens, sampling_s=sampling_s)
            samples = self._scoring.samples(state.global_step, batches[-1].versions) if batches else []
            self._tracker.step(metrics, samples)
            if remark := self._flat.step(logs, metrics.reward_mean):
                self._tracker.note(remark)
            logs.update(step_figures(metrics))
        if self._after_step is not None:
            self._after_step(state.global_step)
        stopped = ranks.any_of(self._stop is not None and self._stop.is_set())  # While it evaluated, perhaps.
        if self._is_enough() or stopped:
            control.should_training_stop = control.should_save = True
        self._mark = time.perf_counter()
        return control

    def on_save(self, *_: Any, **__: Any) -> None:
        """Writing a checkpoint is no part of the next step."""
        self._mark = time.perf_counter()

    def _publish(self, step: int) -> None:
        turns = self._rollouts.sampler.turns
        turns.make_room()
        self._publisher.publish(step, self._model)
        if self._rollouts.in_use(step):  # The server's turn is not next.
            started = time.perf_counter()
            turns.sleep_again()
            self._step_s += time.perf_counter() - started

    def _is_enough(self) -> bool:
        """What the first process knows; all have to ask."""
        return ranks.any_of(self._enough is not None and self._enough())

    def _metrics(
        self,
        step: int,
        logs: dict[str, float],
        batches: list[Batch],
        figures: Figures,
        *,
        tokens: int,
        sampling_s: float,
    ) -> StepMetrics:
        """tokens: that all trainer processes sampled. sampling_s: that the server took for them, all at the same time.
        Other times, ratio and staleness are the first process's.
        """
        # A step that reuses a batch has no rollout: its reward and length are those of the batch.
        self._carried |= {
            key: logs[key] for key in ("reward", "reward_std", "completions/mean_length") if logs.get(key) is not None
        }
        proof, proof_ms = self._prover.take()
        published = self._publisher.last
        assert published is not None, "a step ends with a publish"
        rollout_s = sum(batch.seconds for batch in batches)
        turned = self._rollouts.sampler.turns.take()
        return StepMetrics(
            step=step,
            version=published.loaded.version,
            staleness=None if figures.oldest_version is None else step - 1 - figures.oldest_version,
            reward_mean=self._carried.get("reward"),
            reward_std=self._carried.get("reward_std"),
            loss=logs.get("loss"),
            learning_rate=logs["learning_rate"],
            ratio_mean=figures.ratio_mean,
            dlogp_mean_abs=figures.dlogp_mean_abs,
            grad_norm=logs.get("grad_norm"),
            completion_length=self._carried.get("completions/mean_length"),
            rollout_s=rollout_s,
            train_s=max(0.0, self._step_s - rollout_s - turned.seconds),
            publish_ms=published.publish_ms,
            load_ms=published.load_ms,
            proof=proof,
            proof_ms=proof_ms,
            overlap=self._overlap(batches),
            sleep_s=turned.sleep_s,
            wake_s=turned.wake_s,
            freed_bytes=turned.freed_bytes,
            generated_tokens=tokens,
            generated_tokens_per_s=tokens / sampling_s if sampling_s else None,
        )

    def _overlap(self, batches: list[Batch]) -> float | None:
        """The share of the server's time for these batches that nobody waited for; None if nothing is sampled ahead."""
        sampling_s = sum(batch.sampling_s for batch in batches)
        if not self._rollouts.depth or not sampling_s:
            return None
        return max(0.0, 1 - sum(batch.seconds for batch in batches) / sampling_s)

    def _require_change(self, logs: dict[str, float]) -> None:
        try:
            self._publisher.require_change(
                learning_rate=logs["learning_rate"], grad_norm=float(logs.get("grad_norm", 0.0))
            )
        except SyncMismatch as error:
            self._prover.mismatch(error)
