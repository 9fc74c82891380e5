"""The trackers of tracking.report_to: whether they are installed, and what they are told of where things go."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from bridge.errors import ConfigError
from trainer_env import extra_packages
from trainer_env.config import TrainConfig
from trainer_env.runs.records import Evaluation, StepMetrics

PROJECT = "tandem"
"""What a tracker files runs under, unless its own variable says otherwise."""

_IN_PACKAGE = {"comet_ml": "comet-ml"}
"""Trackers whose package on the index has another name."""
_OFFLINE = {
    "wandb": "`wandb login`, or WANDB_MODE=offline to keep everything in the run's folder.",
    "comet_ml": "Set COMET_API_KEY, or COMET_START_ONLINE=0.",
    "swanlab": "`swanlab login`, or SWANLAB_MODE=local.",
}
_TRLS = ("reward_mean", "reward_std", "loss", "learning_rate", "grad_norm", "completion_length", "step")
"""Figures of a step that TRL reports under names of its own."""


def require_packages(names: Sequence[str]) -> None:
    """Raise ConfigError, with the command that installs them, for trackers whose packages are missing here."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        packages = [_IN_PACKAGE.get(name, name) for name in missing]
        raise ConfigError(
            f"tracking.report_to: {extra_packages.environment()} does not have what "
            f"{' and '.join(map(repr, missing))} needs: {' '.join(packages)}.",
            remedy=extra_packages.remedy(*packages),
        )


def remedy(name: str) -> str:
    """What to do when a tracker does not start."""
    return _OFFLINE.get(name, f"Leave {name!r} out of tracking.report_to; metrics.jsonl has every figure as well.")


def variables(config: TrainConfig) -> dict[str, str]:
    """What trackers read from the environment, for one run. A user's own variables win."""
    run_dir = config.run_dir.absolute()
    return {
        "TENSORBOARD_LOGGING_DIR": str(run_dir / "tensorboard"),
        "WANDB_PROJECT": PROJECT,
        "WANDB_DIR": str(run_dir),
        "MLFLOW_EXPERIMENT_NAME": PROJECT,
        "COMET_PROJECT_NAME": PROJECT,
        "SWANLAB_PROJECT": PROJECT,
        "SWANLAB_LOG_DIR": str(run_dir / "swanlog"),
    }


@contextmanager
def filled_in(values: Mapping[str, str]) -> Iterator[None]:
    """Variables that are not set have these values meanwhile: the next run of this process has others."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def step_figures(metrics: StepMetrics) -> dict[str, float]:
    """A step's figures that TRL does not have, by the names that trackers get."""
    fields = ((name, getattr(metrics, name)) for name in metrics.__struct_fields__ if name not in _TRLS)
    return {f"tandem/{name}": value for name, value in fields if isinstance(value, int | float)}


def evaluation_figures(record: Evaluation) -> dict[str, float]:
    """An evaluation's figures, by the names that trackers get: `eval_…` is a group of its own there."""
    passed = {f"eval_pass@{count}": share for count, share in record.pass_at.items()}
    return {"eval_reward": record.reward_mean, **passed, "eval_seconds": record.seconds}
