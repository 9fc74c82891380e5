"""Everything that can be said of a config before a run: both halves' settings, the machine, trackers, data, rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bridge.errors import BridgeError, ConfigError
from bridge.settings import apply_overrides, decode_dict, problems, read_toml
from trainer_env.config import TrainConfig, rules
from trainer_env.runs import report_to

if TYPE_CHECKING:
    from trainer_env.data import Data


class Verdict(msgspec.Struct, frozen=True):
    """What was found of one config. problems: what to mend. unchecked: what could not be looked at, and why."""

    source: str
    problems: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether there is nothing to mend."""
        return not self.problems

    def lines(self) -> list[str]:
        """For people: one line when all is well."""
        if self.problems:
            return [*self.problems, *(f"{self.source}: not checked: {what}" for what in self.unchecked)]
        but = f"; not checked: {'; '.join(self.unchecked)}" if self.unchecked else ""
        return [f"{self.source}: good{but}"]


def check(path: Path, overrides: Sequence[str] = (), *, load: bool = False) -> Verdict:
    """Look for everything that is wrong with a config file. load: read its data and rewards as well.

    Where values are wrong, what follows from several of them is not looked at: it would be about other values.
    """
    source = str(path)
    try:
        data = apply_overrides(read_toml(path), overrides)
    except ConfigError as error:
        return Verdict(source, (str(error),))
    if wrong := problems(data, TrainConfig, source):
        return Verdict(source, tuple(map(str, wrong)))
    config = decode_dict(data, TrainConfig, source)
    found = _said_by(lambda: rules.check(config, source), "")
    served, unchecked = _server_half(config, source) if not found else ([], ["the server half, until this is mended"])
    found += served
    found += _said_by(lambda: report_to.require_packages(config.tracking.report_to), source)
    if load:
        wrong, unseen = _data_and_rewards(config, source)
        found, unchecked = found + wrong, unchecked + unseen
    return Verdict(source, tuple(found), tuple(unchecked))


def _data_and_rewards(config: TrainConfig, source: str) -> tuple[list[str], list[str]]:
    """(What is wrong with data, rewards, the model's name and the lengths of prompts; what could not be looked at.)"""
    from trainer_env import data, rewards
    from trainer_env.rewards.columns_check import check_columns

    read: list[data.Data] = []
    loaded: list[list[rewards.Reward]] = []
    wrong = _said_by(lambda: read.append(data.load(config.data, config.seed)), source)
    wrong_rewards = _said_by(lambda: loaded.append(rewards.load(config.rewards)), source)
    if not read:
        return wrong + wrong_rewards, []
    wrong, unchecked = _lengths(config, read[0], source)
    if loaded:
        wrong_rewards = _said_by(lambda: check_columns(config.rewards, loaded[0], read[0]), source)
    return wrong + wrong_rewards, unchecked


def _lengths(config: TrainConfig, data: "Data", source: str) -> tuple[list[str], list[str]]:
    """(What is wrong with the model's name and the lengths of prompts; what could not be looked at.)"""
    from trainer_env import models
    from trainer_env.sampling.prompts import fitting_early

    if missing := models.missing_packages(config.model.name):
        return [], [
            f"the lengths of prompts: {config.model.name} is made from {', '.join(missing)}, not installed here"
        ]
    return _said_by(lambda: fitting_early(config, data, models.resolve(config.model.name)), source), []


def _server_half(config: TrainConfig, source: str) -> tuple[list[str], list[str]]:
    """(What the server half refuses, what could not be asked of it.)"""
    from trainer_env.serving import Serving
    from trainer_env.serving.server_process import environment_folder
    from trainer_env.session.opening import place

    try:
        environment_folder(config.backend)
    except ConfigError as error:
        return [], [f"the server half: {error.what} ({error.remedy})"]
    try:
        placement = place(config, source)
    except ConfigError as error:
        return [], [f"the server half, since this machine cannot run it: {error.what}"]
    try:
        Serving(config, placement, say=lambda _: None).check(source)
    except ConfigError as error:
        return [str(error)], []
    except BridgeError as error:
        return [], [f"the server half: {error.what}"]
    return [], []


def _said_by(work: Callable[[], object], source: str) -> list[str]:
    """What a check has to say, each problem under the name of the file."""
    try:
        work()
    except ConfigError as error:
        if not source:
            return error.what.splitlines()
        said = str(error)
        return [said if said.startswith(f"{source}: ") else f"{source}: {said}"]
    return []
