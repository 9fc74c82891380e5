"""The trackers of tracking.report_to: whether they are installed, and what they are told of where things go."""

import importlib.util
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from bridge.errors import ConfigError
from trainer_env import extra_packages
from trainer_env.config import TrainConfig
from trainer_env.runs.jsonl import write_atomically
from trainer_env.runs.records import Evaluation, StepMetrics

PROJECT = "tandem"
"""What a tracker files runs under, unless its own variable says otherwise."""

WANDB_ID = "wandb_id"
"""A file of the run's folder: what makes this run's id at Weights & Biases unlike any other's."""

_RESUMES_BY_ITSELF = ("auto", "never")
"""Values of WANDB_RESUME under which wandb chooses the run: the last one here, or a new one."""
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


def wandb_run(config: TrainConfig, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Which run of Weights & Biases this is, as wandb.init takes it: the same one again when the run goes on.

    Its id is kept in the run's folder: a folder that is made anew, or of the same name elsewhere, is another run. A
    user's own WANDB_RUN_ID and WANDB_RESUME (given) win. Arguments rather than variables, for wandb reads its
    variables once in a process, and a notebook has several runs. Raises BridgeError when the id cannot be written.
    """
    resume = given.get("WANDB_RESUME")
    chosen = {} if resume else {"resume": "allow"}
    if not given.get("WANDB_RUN_ID") and resume not in _RESUMES_BY_ITSELF:
        chosen["id"] = f"{config.run[:40]}-{_token(config.run_dir / WANDB_ID)}"
    return chosen


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        token = secrets.token_hex(6)
        write_atomically(path, f"{token}\n".encode())
        return token


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
