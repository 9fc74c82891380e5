"""Tasks of an environment made for the `verifiers` package: their prompts as rows, and what scores them.

Only tasks of one turn: a prompt, a completion, and rewards that read both. What needs tools, a container or another
process is refused.
"""

import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from bridge.errors import ConfigError
from trainer_env import extra_packages

PREFIX = "verifiers:"
TASKSET, TASK = "verifiers_taskset", "verifiers_task"
"""Columns of a row: its taskset, as a key of `tasks`, and the place of its task in it."""

_PLAIN = (str, int, float, bool)
_PACKAGE = "verifiers>=0.4"


def read(name: str, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task: its prompt, what fields of its own it has, and where to find it. Raises ConfigError."""
    key = json.dumps([name, arguments], sort_keys=True)
    return [
        {"answer": None, **_fields(task), "prompt": _prompt(task), TASKSET: key, TASK: place}
        for place, task in enumerate(tasks(key))
    ]


@functools.cache
def tasks(key: str) -> list[Any]:
    """The tasks of a taskset, loaded once in a process. Raises ConfigError."""
    name, arguments = json.loads(key)
    vf = library()
    try:
        config = vf.taskset_config_type(name).model_validate({"id": name, **arguments})
        taskset = vf.load_taskset(config)
        if not taskset.bounded:
            raise ConfigError(
                f"data.source: the tasks of {name} never end.", remedy="Bound them in the taskset's load()."
            )
        found = list(taskset)
        for task in found:
            _require_one_turn(name, taskset, task)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.source: the environment {name!r} cannot be imported: {_line(error)}.",
            why="What follows verifiers: is imported, or has a package of its own that is not installed here.",
            remedy=f"With that package's name, folder or URL: {extra_packages.remedy('PACKAGE')}",
        ) from error
    except Exception as error:
        raise ConfigError(
            f"data.source: the environment {name!r} cannot be loaded: {type(error).__name__}: {_line(error)}.",
            why="It was given data.args.",
        ) from error
    return found


def library() -> Any:
    """The part of the verifiers package that is used here. Raises ConfigError."""
    try:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "verifiers":
            raise
        raise ConfigError(
            f"data.source: verifiers is not installed ({error}).", remedy=extra_packages.remedy(_PACKAGE)
        ) from None
    missing = [
        name for name in ("load_taskset", "taskset_config_type", "Trace", "MessageNode") if not hasattr(vf, name)
    ]
    if missing:
        raise ConfigError(
            f"data.source: this release of verifiers has no {', '.join(missing)}.",
            remedy=extra_packages.remedy(_PACKAGE),
        )
    return vf


def _line(error: Exception) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()).rstrip(".")


def _require_one_turn(name: str, taskset: Any, task: Any) -> None:
    what = ""
    if type(task).NEEDS_CONTAINER:
        what = "run in a container"
    elif taskset.toolsets(taskset.config) or type(task).toolsets(task.config):
        what = "have tools"
    elif needy := [reward.__name__ for reward in task.hooks("reward") if _needs_runtime(reward)]:
        what = f"have a reward that needs a running process: {needy[0]}"
    elif not task.hooks("reward") and not task.config.judges:
        what = "have no rewards"
    if what:
        raise ConfigError(
            f"data.source: tasks of {name} {what}.",
            why="Tandem scores one completion by what a task's rewards make of its text.",
        )


def _needs_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _fields(task: Any) -> dict[str, Any]:
    """What the task's own data has beyond what every task's has, where it is plain."""
    common = set(library().TaskData.model_fields)
    own = {name: getattr(task.data, name) for name in type(task.data).model_fields if name not in common}
    return {
        name: value
        for name, value in own.items()
        if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value))
    }


def _prompt(task: Any) -> Any:
    data = task.data
    if isinstance(data.prompt, str) and not data.system_prompt:
        return data.prompt
    if isinstance(data.prompt, str):
        turns = [{"role": "user", "content": data.prompt}]
    else:
        turns = [{"role": message.role, "content": message.content} for message in data.prompt or []]
    return [{"role": "system", "content": data.system_prompt}, *turns] if data.system_prompt else turns
