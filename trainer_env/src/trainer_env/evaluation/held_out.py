"""What evaluations mean for a run: which adapter is the best so far, and whether training is to go on."""

from collections.abc import Sequence

from trainer_env.config import EvaluationConfig
from trainer_env.runs.records import Best, Evaluation


class HeldOut:
    """Counts a run's evaluations, one after the other.

    earlier: those that a resumed run goes on from. kept: what best/ holds, of them or of a step that is taken again.

    A reward is better when it exceeds the best one so far by more than early_stopping_threshold. For the patience that
    is the best of all, the base model's before training among them. For best/ it is that of the adapter there: a run
    that gets nowhere still leaves its best adapter.
    """

    def __init__(
        self, config: EvaluationConfig, *, earlier: Sequence[Evaluation] = (), kept: Best | None = None
    ) -> None:
        self._config = config
        self.best = kept
        """The adapter in best/."""
        self.bar: float | None = None
        """The reward to exceed."""
        self.without = 0
        """Evaluations in a row that did not."""
        for record in earlier:
            self._count(record)

    def note(self, record: Evaluation) -> bool:
        """Count an evaluation in; whether the adapter that it measured is to be kept as the best."""
        self._count(record)
        # With one evaluation, the one at the end, the best adapter would be a copy of the last.
        if not self._config.keep_best or not self._config.every or record.phase == "eval_before":
            return False
        if self.best is not None and not self._better(record.reward_mean, self.best.reward_mean):
            return False
        self.best = Best(step=record.step, reward_mean=record.reward_mean, version=record.step)
        return True

    @property
    def enough(self) -> bool:
        """Whether training is to end: early_stopping_patience evaluations in a row were no better."""
        return 0 < self._config.early_stopping_patience <= self.without

    def _count(self, record: Evaluation) -> None:
        if record.phase == "eval_after":
            return  # No training is left to be ended.
        if self.bar is None or self._better(record.reward_mean, self.bar):
            self.bar, self.without = record.reward_mean, 0
        else:
            self.without += 1

    def _better(self, reward: float, than: float) -> bool:
        return reward > than + self._config.early_stopping_threshold
