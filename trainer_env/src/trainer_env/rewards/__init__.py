"""Reward functions: loaded by name, called with TRL's signature, and held to one finite number a completion."""

import functools
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env import extra_packages
from trainer_env.config import RewardConfig
from trainer_env.rewards.builtin_rewards import BUILTINS
from trainer_env.rewards.completions import RewardFunction, check_of
from trainer_env.rewards.reward_errors import RewardError, sample_at, shown
from trainer_env.rewards.reward_pool import run_together

GIVEN = ("prompts", "completions", "completion_ids", "finish_reason")
"""What every reward is given for each batch, besides the data's columns."""


class Reward:
    """One reward function under its name, with its weight and its time limit in seconds for one batch."""

    def __init__(self, name: str, function: RewardFunction, weight: float = 1.0, timeout_s: float = 60.0) -> None:
        self.name = name
        self.weight = weight
        self.timeout_s = timeout_s
        self.__name__ = name
        self.bounded = bool(getattr(function, "bounded", False))
        self.check = check_of(function)
        self.function = function

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """One score a completion, within the time limit. Raises RewardError as `run_together` does."""
        return run_together([self], prompts, completions, columns)[0]

    def scores(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> list[float]:
        """One score a completion, without a limit, in this thread.

        columns: a list each with one entry a completion, such as answer and finish_reason. Raises RewardError if the
        function returns anything but one finite number a completion, and else what it raises.
        """
        scores = self.function(prompts=prompts, completions=completions, **columns)
        if isinstance(scores, str | bytes | Mapping) or not hasattr(scores, "__iter__"):
            raise RewardError(
                f"Reward {self.name!r} returned {shown(scores)} instead of a list with a number for each completion."
            )
        scores = list(scores)
        if len(scores) != len(completions):
            raise RewardError(
                f"Reward {self.name!r} returned {len(scores)} numbers for {len(completions)} completions.",
                remedy="Return exactly one for each completion, in their order.",
            )
        return [self._checked(score, row, prompts, completions) for row, score in enumerate(scores)]

    def _checked(self, score: Any, row: int, prompts: Sequence[Any], completions: Sequence[Any]) -> float:
        value = None if isinstance(score, str | bytes) or not hasattr(score, "__float__") else float(score)
        if value is None or not math.isfinite(value):
            where = sample_at(row, prompts, completions)
            raise RewardError(f"Reward {self.name!r} returned {shown(score)} instead of a finite number {where}")
        return value


class Scores(msgspec.Struct, frozen=True):
    """What completions are worth: total, the weighted sum, and each reward's own score by its name."""

    total: list[float]
    each: dict[str, list[float]]


def score(
    rewards: Sequence[Reward], prompts: Sequence[Any], completions: Sequence[Any], /, **columns: list[Any]
) -> Scores:
    """All rewards of some completions, computed at the same time. A column may have any name. Raises RewardError."""
    found = run_together(rewards, prompts, completions, columns)
    each = {reward.name: scores for reward, scores in zip(rewards, found, strict=True)}
    total = [sum(reward.weight * each[reward.name][row] for reward in rewards) for row in range(len(completions))]
    return Scores(total, each)


def load(configs: Sequence[RewardConfig]) -> list[Reward]:
    """The reward functions of a run. Raises ConfigError, naming the setting and the nearest name."""
    files: dict[Path, ModuleType] = {}
    functions = [_function(config, f"rewards.{index}", files) for index, config in enumerate(configs)]
    return [
        Reward(config.name or config.function, function, config.weight, config.timeout_s)
        for config, function in zip(configs, functions, strict=True)
    ]


def _function(config: RewardConfig, where: str, files: dict[Path, ModuleType]) -> RewardFunction:
    """files: those that were run already, each by its path."""
    place, colon, name = config.function.rpartition(":")
    if not colon:
        return _builtin(config, where)
    module = _file(Path(place), where, files) if place.endswith(".py") else _module(place, where)
    if not callable(getattr(module, name, None)):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = nearest(name, names)
        raise ConfigError(
            f"{where}.function: {place} has no function {name!r}.",
            remedy=f"Did you mean {place}:{near}?" if near else f"It has: {', '.join(names) or 'none'}.",
        )
    function: RewardFunction = getattr(module, name)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}.function: {name} is async; expected a plain function.")
    _check_args(function, config.args, where)
    if taken := [name for name in GIVEN if name in config.args]:
        raise ConfigError(f"{where}.args.{taken[0]}: it is what every reward is given for each batch.")
    return _with_args(function, config.args) if config.args else function


def _with_args(function: RewardFunction, args: Mapping[str, Any]) -> RewardFunction:
    """The function with its args, before which a column of the same name stands back."""

    @functools.wraps(function)
    def reward(**batch: Any) -> Sequence[float]:
        return function(**{**batch, **args})

    return reward


def _builtin(config: RewardConfig, where: str) -> RewardFunction:
    make = BUILTINS.get(config.function)
    if make is None:
        near = nearest(config.function, list(BUILTINS))
        raise ConfigError(
            f"{where}.function: there is no built-in reward {config.function!r}.",
            remedy=f"Did you mean {near!r}?"
            if near
            else f"There are {', '.join(BUILTINS)}; your own is module:function or path/to/file.py:function.",
        )
    _check_args(make, config.args, where)
    missing = [name for name, parameter in _parameters(make).items() if parameter.default is parameter.empty]
    if missing := [name for name in missing if name not in config.args]:
        raise ConfigError(f"{where}.args: {config.function} needs {', '.join(missing)}.")
    try:
        return make(**{**_limits(make, config.timeout_s), **config.args})
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"{where}.args: {config.function}: {error}.") from None


def _limits(make: Callable[..., RewardFunction], timeout_s: float) -> dict[str, float]:
    """A limit on a whole batch for a built-in that has one: it ends first, and can say what took so long."""
    return {"batch_s": 0.9 * timeout_s} if "batch_s" in _parameters(make) else {}


def _check_args(function: Callable[..., Any], args: Mapping[str, Any], where: str) -> None:
    parameters = _parameters(function)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in args:
        if name not in parameters:
            near = nearest(name, list(parameters))
            raise ConfigError(
                f"{where}.args.{name}: there is no such argument.",
                remedy=f"Did you mean {near!r}?" if near else f"There are: {', '.join(parameters) or 'none'}.",
            )


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _file(path: Path, where: str, files: dict[Path, ModuleType]) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{where}.function: {path}: there is no such file.",
            why=f"A relative path starts from the working directory, {Path.cwd()}.",
        )
    path = path.resolve()
    if path in files:
        return files[path]
    # As for a script, whose neighbours it can import; behind what is installed.
    _look_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"tandem_reward_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Registered first, as an import would: dataclasses and pickle look a module up by its name.
    sys.modules[spec.name] = module
    files[path] = _imported(lambda: spec.loader.exec_module(module) or module, str(path), where)  # pyright: ignore[reportOptionalMemberAccess]
    return files[path]


def _module(name: str, where: str) -> ModuleType:
    # A console script has its own folder first, and a user's module lies where the command was typed.
    _look_in(Path.cwd())
    return _imported(lambda: importlib.import_module(name), name, where)


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _imported(run: Callable[[], ModuleType], name: str, where: str) -> ModuleType:
    try:
        return run()
    except Exception as error:
        raise ConfigError(
            f"{where}.function: {name} cannot be imported: {type(error).__name__}: {error}.",
            remedy=_remedy(error, name),
        ) from error


def _remedy(error: Exception, name: str) -> str:
    here = f"It runs in the trainer's environment, {extra_packages.environment()}"
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    # A module of the user's own that is not found, or a part that an installed package lacks: no package to install.
    if not missing or missing == name.partition(".")[0] or missing in sys.modules:
        return f"{here}: import only what is installed there."
    return f"{here}. If {missing} is a package on the index: {extra_packages.remedy(missing)}"
