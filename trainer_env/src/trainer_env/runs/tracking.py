"""What is kept of a run: figures of each step, samples, evaluations, and the summary at the end."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from trainer_env.config import EvaluationConfig
from trainer_env.display import Display, open_display
from trainer_env.evaluation import best_adapter
from trainer_env.evaluation.held_out import HeldOut
from trainer_env.runs.finding import taken
from trainer_env.runs.jsonl import JsonLines, write_atomically
from trainer_env.runs.records import Evaluation, Phase, Sample, StepMetrics, Summary
from trainer_env.runs.run_reader import summary_of

KEPT_ANSWERS = 256
"""Up to so many answers of one evaluation are kept in samples.jsonl; of more, the first to each example."""


class Reporter(Protocol):
    """Who else is told of a run's evaluations: see `reporters.Reporters`."""

    def evaluation(self, record: Evaluation) -> None:
        """An evaluation has ended."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class Tracker:
    """Writes metrics.jsonl, samples.jsonl, evaluations.jsonl, summary.json and reward.png of one run, and shows them.

    total_steps: optimizer steps of the whole run. resume_step: the checkpoint that the run goes on from; what was
    recorded after it is dropped, since it will be done again. The adapter in best/ stays, whatever step it is of. None:
    a new run. evaluation: what the held-out rewards are to mean for the run.
    """

    def __init__(
        self,
        run_dir: Path,
        total_steps: int,
        *,
        display: Literal["auto", "live", "plain", "none"] | Display = "auto",
        samples_per_step: int = 2,
        resume_step: int | None = None,
        evaluation: EvaluationConfig | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.display = open_display(display, total_steps) if isinstance(display, str) else display
        self._total_steps = total_steps
        self._samples_per_step = samples_per_step
        self._reporter: Reporter | None = None
        self._unreported: list[Evaluation] = []
        self._started = time.monotonic()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics_file = JsonLines(run_dir / "metrics.jsonl", StepMetrics)
        self._samples_file = JsonLines(run_dir / "samples.jsonl", Sample)
        self._evaluations_file = JsonLines(run_dir / "evaluations.jsonl", Evaluation)
        recorded = self._metrics_file.read()
        if resume_step is None and recorded:
            raise taken(run_dir)
        last = resume_step or 0
        summary = summary_of(run_dir) if resume_step is not None else None
        self._earlier_s = max((metrics.wall_s or 0.0 for metrics in recorded), default=0.0)
        if summary:
            self._earlier_s = max(self._earlier_s, summary.wall_s)
        self._earlier_restarts = summary.restarts if summary else 0
        self.steps = [metrics for metrics in recorded if metrics.step <= last]
        self.evaluations = [item for item in self._evaluations_file.read() if _still_holds(item, last, resume_step)]
        self.samples = [item for item in self._samples_file.read() if _still_holds(item, last, resume_step)]
        self._metrics_file.keep(self.steps)
        self._evaluations_file.keep(self.evaluations)
        self._samples_file.keep(self.samples)
        self.held_out = HeldOut(
            evaluation or EvaluationConfig(),
            earlier=self.evaluations,
            kept=best_adapter.restored(run_dir, resumed=resume_step is not None),
        )

    def status(self, text: str) -> None:
        """Say what the run is doing between steps: loading, starting the server, evaluating."""
        self.display.status(text)

    def note(self, text: str) -> None:
        """Say what is good to know for as long as the run lasts: where to look."""
        self.display.note(text)

    def report_to(self, reporter: Reporter) -> None:
        """Tell somebody else of evaluations as well, those of this process's time with the run until now among them."""
        self._reporter = reporter
        self._report()

    def step(self, metrics: StepMetrics, samples: Sequence[Sample] = ()) -> None:
        """Record an optimizer step, and of its samples a few from the worst to the best."""
        metrics = msgspec.structs.replace(metrics, wall_s=self._wall_s())
        self._metrics_file.append(metrics)
        self.steps.append(metrics)
        self._keep_samples(spread(samples, self._samples_per_step))
        self.display.step(metrics)

    def evaluation(
        self,
        phase: Phase,
        step: int,
        samples: Sequence[Sample],
        seconds: float,
        *,
        num_generations: int = 1,
        temperature: float = 0.0,
        pass_at: Mapping[str, float] | None = None,
    ) -> Evaluation:
        """Record an evaluation. step: optimizer steps taken so far. samples: num_generations for each example, in turn.

        What it means for the run is for `held_out` to say.
        """
        assert samples, "an evaluation answers at least one example"
        record = Evaluation(
            phase=phase,
            step=step,
            reward_mean=statistics.fmean(sample.reward for sample in samples),
            examples=len(samples) // num_generations,
            seconds=seconds,
            num_generations=num_generations,
            temperature=temperature,
            pass_at=dict(pass_at or {}),
        )
        self._evaluations_file.append(record)
        self.evaluations.append(record)
        self._keep_samples(samples if len(samples) <= KEPT_ANSWERS else samples[::num_generations])
        self.display.evaluation(record)
        self._unreported.append(record)
        self._report()
        return record

    def finish(self, *, backend: str, placement: str, adapter: Path | None, restarts: int = 0) -> Summary:
        """Write summary.json and reward.png, show samples from before and after, and say where everything is.

        placement: the mode. adapter: the folder of the final adapter. restarts: in this process's time.
        """
        rewards = [metrics.reward_mean for metrics in self.steps if metrics.reward_mean is not None]
        steps, best = self.steps[-1].step if self.steps else 0, self.held_out.best
        summary = Summary(
            backend=backend,
            placement=placement,
            steps=steps,
            reward_first4=statistics.fmean(rewards[:4]) if rewards else None,
            reward_last4=statistics.fmean(rewards[-4:]) if rewards else None,
            eval_before=self._eval_reward("eval_before"),
            eval_after=self._eval_reward("eval_after"),
            wall_s=self._wall_s(),
            adapter=str(adapter) if adapter else None,
            restarts=self._earlier_restarts + restarts,
            best_step=best.step if best else None,
            best_reward=best.reward_mean if best else None,
            stopped_early=self.held_out.enough and steps < self._total_steps,
            proof=Counter(metrics.proof for metrics in self.steps if metrics.proof is not None),
        )
        write_atomically(self.run_dir / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
        if rewards:
            # Drawn last and imported late: matplotlib takes a second, and the figures are safe by now.
            from trainer_env.display.plot import plot_rewards

            plot_rewards(self.run_dir / "reward.png", self.steps, self.evaluations)
        self.display.finish(summary, self.run_dir, self._phase("eval_before"), self._phase("eval_after"))
        return summary

    def close(self) -> None:
        """Give the terminal back and close the files, when trackers have what is theirs."""
        reporter, self._reporter = self._reporter, None
        if reporter:
            reporter.close()
        self.display.close()
        for file in (self._metrics_file, self._samples_file, self._evaluations_file):
            file.close()

    def _wall_s(self) -> float:
        """What the run has taken so far, in all its processes."""
        return round(self._earlier_s + time.monotonic() - self._started, 3)

    def _report(self) -> None:
        if self._reporter:
            told, self._unreported = self._unreported, []
            for record in told:
                self._reporter.evaluation(record)

    def _keep_samples(self, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._samples_file.append(sample)
        self.samples.extend(samples)

    def _phase(self, phase: Phase) -> list[Sample]:
        return [sample for sample in self.samples if sample.phase == phase]

    def _eval_reward(self, phase: Phase) -> float | None:
        return next((item.reward_mean for item in reversed(self.evaluations) if item.phase == phase), None)


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most count samples, evenly from the lowest reward to the highest."""
    ranked = sorted(samples, key=lambda sample: sample.reward)
    if count >= len(ranked) or count < 2:
        return ranked[:count]
    return [ranked[round(index * (len(ranked) - 1) / (count - 1))] for index in range(count)]


def _still_holds(record: Evaluation | Sample, last: int, resume_step: int | None) -> bool:
    """Whether a record is older than the checkpoint. The evaluation at the end belongs to a run that went on."""
    return resume_step is not None and record.step <= last and record.phase != "eval_after"
