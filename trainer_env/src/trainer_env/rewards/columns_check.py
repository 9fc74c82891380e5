"""Whether rewards can be called with what the data has, which is known before anything starts."""

import inspect
from collections.abc import Sequence

from bridge.errors import ConfigError
from bridge.settings import nearest
from trainer_env.config import RewardConfig
from trainer_env.data import Data, Example, column_names, columns
from trainer_env.rewards import GIVEN, Reward
from trainer_env.rewards.completions import RowError
from trainer_env.rewards.reward_errors import asked, shown


def check_columns(configs: Sequence[RewardConfig], rewards: Sequence[Reward], data: Data) -> None:
    """Refuse a function that cannot be called with the data's columns, and an example that a built-in cannot score.

    configs: what the rewards were loaded from. Raises ConfigError, naming the setting, and the column or the example.
    """
    for part, examples in (("to train on", data.train), ("held out", data.evaluation)):
        names = [name for name in column_names(examples) if name != "prompt"]
        for index, (config, reward) in enumerate(zip(configs, rewards, strict=True)):
            where = f"rewards.{index}"
            if examples:
                _check_call(reward, [*GIVEN, *names], config, where)
                _check_examples(reward, examples, names, f"{where}.function: {config.function}", part)


def _check_call(reward: Reward, given: Sequence[str], config: RewardConfig, where: str) -> None:
    signature = inspect.signature(reward.function)
    try:
        signature.bind(**dict.fromkeys([*given, *config.args]))
    except TypeError as error:
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        missing = [name for name in signature.parameters if name not in given and f"'{name}'" in str(error)]
        near = nearest(missing[0], given) if missing else None
        raise ConfigError(
            f"{where}.function: {config.function} cannot be called with the data's columns: {error}.",
            why=f"It is given, each by its name: {', '.join(given)}.",
            remedy="Let it take **columns, where those go that it does not name."
            if not takes_all
            else f"Did you mean {near!r}?"
            if near
            else "Let it name a column that is there, give the name a default, or add the column to the data.",
        ) from None


def _check_examples(reward: Reward, examples: Sequence[Example], names: Sequence[str], what: str, part: str) -> None:
    if reward.check is None:
        return
    try:
        reward.check(columns(examples, names))
    except RowError as error:
        prompt = shown(asked(examples[error.row].prompt))
        raise ConfigError(
            f"{what}: {error}, for example {error.row + 1} of those {part}.\n  prompt: {prompt}",
            remedy="Mend the row with that prompt, or remove it.",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{what}: {error}.", why=f"The examples {part} have: {', '.join(names)}.") from None
