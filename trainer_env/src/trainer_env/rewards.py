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

from bridge.errors import BridgeError, ConfigError
from bridge.settings import nearest
from trainer_env.builtin_rewards import BUILTINS, RewardFunction, text_of
from trainer_env.config import RewardConfig


class RewardError(BridgeError, ValueError):
    """A reward function failed on a completion."""

    code = "reward"


class Reward:
    """One reward function under its name. TRL calls it; so does an evaluation."""

    def __init__(self, name: str, function: RewardFunction, weight: float = 1.0) -> None:
        self.name = name
        self.weight = weight
        self.__name__ = name
        self._function = function

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        """One score a completion. columns: a list each with one entry a completion, such as answer and finish_reason.

        Raises RewardError, naming the reward, the row and the completion, if the function raises or returns anything
        but one finite number a completion.
        """
        try:
            scores = self._function(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise self._raised(error, prompts, completions, columns) from error
        if isinstance(scores, str | bytes | Mapping) or not hasattr(scores, "__iter__"):
            raise RewardError(
                f"Reward {self.name!r} returned {_shown(scores)} instead of a list with a number for each completion."
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
            where = _where(row, prompts, completions)
            raise RewardError(f"Reward {self.name!r} returned {_shown(score)} instead of a finite number {where}")
        return value

    def _raised(
        self, error: Exception, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]
    ) -> RewardError:
        """The error for a function that raised, with the first row on which it raises alone."""
        what = f"Reward {self.name!r} raised {type(error).__name__}: {error}"
        for row in range(len(completions)):
            alone = {
                name: [column[row]] if isinstance(column, list) and len(column) == len(completions) else column
                for name, column in columns.items()
            }
            try:
                self._function(prompts=prompts[row : row + 1], completions=completions[row : row + 1], **alone)
            except Exception as cause:  # noqa: BLE001 (as in __call__)
                what = (
                    f"Reward {self.name!r} raised {type(cause).__name__}: {cause}, {_where(row, prompts, completions)}"
                )
                break
        known = [name for name, column in columns.items() if isinstance(column, list)]
        return RewardError(what, why=f"It was given the columns {', '.join(['prompts', 'completions', *known])}.")


class Scores(msgspec.Struct, frozen=True):
    """What completions are worth: total, the weighted sum, and each reward's own score by its name."""

    total: list[float]
    each: dict[str, list[float]]


def score(
    rewards: Sequence[Reward], prompts: Sequence[Any], completions: Sequence[Any], **columns: list[Any]
) -> Scores:
    """All rewards of some completions. Raises RewardError."""
    each = {reward.name: reward(prompts, completions, **columns) for reward in rewards}
    total = [sum(reward.weight * each[reward.name][row] for reward in rewards) for row in range(len(completions))]
    return Scores(total, each)


def load(configs: Sequence[RewardConfig]) -> list[Reward]:
    """The reward functions of a run. Raises ConfigError, naming the setting and the nearest name."""
    return [
        Reward(config.name or config.function, _function(config, f"rewards.{index}"), config.weight)
        for index, config in enumerate(configs)
    ]


def _function(config: RewardConfig, where: str) -> RewardFunction:
    place, colon, name = config.function.rpartition(":")
    if not colon:
        return _builtin(config, where)
    module = _file(Path(place), where) if place.endswith(".py") else _module(place, where)
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
    return functools.partial(function, **config.args) if config.args else function


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
        return make(**config.args)
    except (TypeError, ValueError, re.error) as error:
        raise ConfigError(f"{where}.args: {config.function}: {error}.") from None


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


def _file(path: Path, where: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(
            f"{where}.function: {path}: there is no such file.",
            why=f"A relative path starts from the working directory, {Path.cwd()}.",
        )
    spec = importlib.util.spec_from_file_location(f"tandem_reward_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Registered first, as an import would: dataclasses and pickle look a module up by its name.
    sys.modules[spec.name] = module
    return _imported(lambda: spec.loader.exec_module(module) or module, str(path), where)  # pyright: ignore[reportOptionalMemberAccess]


def _module(name: str, where: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        # A console script has its own folder first, and a user's module lies where the command was typed.
        sys.path.append(str(Path.cwd()))
    return _imported(lambda: importlib.import_module(name), name, where)


def _imported(run: Callable[[], ModuleType], name: str, where: str) -> ModuleType:
    try:
        return run()
    except Exception as error:
        raise ConfigError(
            f"{where}.function: {name} cannot be imported: {type(error).__name__}: {error}.",
            remedy="It runs in the trainer's environment, .venvs/trainer: import only what is installed there.",
        ) from error


def _where(row: int, prompts: Sequence[Any], completions: Sequence[Any]) -> str:
    prompt, completion = prompts[row], text_of(completions[row])
    asked = prompt if isinstance(prompt, str) else " | ".join(text_of([message]) for message in prompt)
    return f"for row {row}.\n  prompt: {_shown(asked)}\n  completion: {_shown(completion)}"


def _shown(value: Any, limit: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
