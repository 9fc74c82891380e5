"""What `config show` says of the server half's settings, which that half explains: as they are set, or come to be."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import ConfigError
from bridge.setting_words import Words
from bridge.toml_values import toml_value
from trainer_env.config import TrainConfig, comparing
from trainer_env.config.setting_words import OTHER_HALF, no_such_setting, with_comments
from trainer_env.serving.server_settings import FILLED_FROM
from trainer_env.serving.server_words import server_words


def explain(key: str, loaded: TrainConfig, source: str, demo: Path) -> tuple[list[str], Words | None]:
    """A setting or a section of that half: each value in a line, and its words.

    Words are None where the server half cannot be asked; a line says so. source: what to call the config. demo: see
    `setting_words.words`. Raises ConfigError for a key that is none, or of which nothing can be said.
    """
    values = comparing.settings(loaded)
    found = [name for name in values if name == key or name.startswith(f"{key}.")]
    lines = {name: f"{name} = {toml_value(values[name].value)}  ({source})" for name in found}
    try:
        told = server_words(loaded.backend)
    except ConfigError as error:
        if not lines and key not in OTHER_HALF:
            raise ConfigError(
                f"{key} belongs to the server half, which cannot be asked what it means.",
                why=error.what,
                log_tail=error.log_tail,
                remedy=error.remedy,
            ) from None
        return [
            *lines.values(),
            f"the server half's: what it means is not known here: {error.what} ({error.remedy})",
        ], None
    if key in OTHER_HALF:
        lines = {name: f"{name} {said}" for name, said in _left_out(key, values, told).items()} | lines
        order = list(told)
        lines = dict(sorted(lines.items(), key=lambda line: order.index(_known(line[0], told))))
    elif key in told and not lines:
        lines = {key: f"{key} {_come_to(key, values, told[key])}"}
    elif not lines:
        raise no_such_setting(key, told)
    return list(lines.values()), with_comments(told[_known(key, told)], demo)


def remarks(loaded: TrainConfig) -> dict[str, str]:
    """Of each setting of the server half that the config leaves out, what it comes to, by its dotted key.

    Those of an engine only where it is the one that samples. Raises ConfigError when that half cannot be asked.
    """
    values, told = comparing.settings(loaded), server_words(loaded.backend)
    return _left_out("server", values, told) | _left_out(loaded.backend, values, told)


def _known(key: str, told: Mapping[str, Words]) -> str:
    """The setting that a key is, or stands in: what is in a table such as engine_env is the table's."""
    while key and key not in told:
        key = key.rpartition(".")[0]
    return key


def _left_out(table: str, values: Mapping[str, Any], told: Mapping[str, Words]) -> dict[str, str]:
    there = {_known(key, told) for key in values}
    names = [key for key in told if key.startswith(f"{table}.") and key not in there]
    return {key: _come_to(key, values, told[key]) for key in names}


def _come_to(key: str, values: Mapping[str, Any], told: Words) -> str:
    """What a setting that is left out comes to, to be read behind its name."""
    source = FILLED_FROM.get(key, "")
    if source in values and values[source].value is not None:
        return f"= {toml_value(values[source].value)}  (from {source})"
    if source:
        return f"comes from {source}" + (": train.py --check shows the plan" if "placement" in source else "")
    return "is not set" if told.default == toml_value(None) else f"= {told.default}  (default)"
