"""What a report's page shows of a run, as plain data: small enough to be part of the page, and safe to look at."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from trainer_env.config.toml_writer import write_toml
from trainer_env.report.thinning import thinned, thinned_steps
from trainer_env.runs.records import Sample, StepMetrics
from trainer_env.runs.run_reader import RunFiles

_NAMES = ("run", "output_dir")
"""Settings that differ between any two runs."""
_KEY = r"(api|access|account|auth|encryption|private|secret|signing|ssh)[_-]?key([_-]?id)?"
_SECRET = re.compile(
    rf"({_KEY}|pass(word|wd|phrase)?|secret|token|credentials?|authori[sz]ation|bearer|cookie)$", re.IGNORECASE
)
"""Names of what is nobody else's business, in any spelling: also of variables, headers and parts of an address."""
_VARIABLES = "engine_env"
"""Of an engine's variables none is shown: which of them are secret is the engine's to know."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s]*(?=@)")
_PARAMETER = re.compile(r"(?<=[?&])([^=&\s]+)=([^&\s#]+)")
_HIDDEN = "(left out of the report)"
_UNSEEN = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    0x7F: "\u2421",
    **{
        code: f"\u27e8U+{code:04X}\u27e9"
        for code in (*range(0x80, 0xA0), 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A))
        if code != 0x200D  # Joins emoji.
    },
    0xFEFF: "\u27e8U+FEFF\u27e9",
}
"""Characters that do something instead of being seen: controls, and marks that turn the direction of text."""


def visible(text: str) -> str:
    """Text as it can be shown: what would be invisible, or change how the rest is read, has a sign in its place."""
    return text.encode(errors="backslashreplace").decode().translate(_UNSEEN)


def run_data(run: RunFiles, *, label: str, sample_bytes: int) -> dict[str, Any]:
    """A run for the page. label: what to call it there. sample_bytes: about how much its samples may take."""
    samples, samples_note = thinned(run.samples, sample_bytes)
    steps, steps_note = thinned_steps(run.steps)
    notes = [note for note in (steps_note, samples_note) if note]
    notes += [f"{count} unreadable lines of {name} are left out." for name, count in run.unreadable.items()]
    if not run.steps:
        notes.append("No optimizer step has been recorded yet.")
    return {
        "label": visible(label),
        "path": visible(str(run.path)),
        "overview": overview(run),
        "columns": columns(steps),
        "evaluations": msgspec.to_builtins(run.evaluations),
        **sample_table(samples),
        "notes": [visible(note) for note in notes],
        "config": visible(config_text(run)),
        "placement": run.placement,
        "environment": msgspec.to_builtins(run.environment) if run.environment else None,
    }


def overview(run: RunFiles) -> dict[str, Any]:
    """What the run came to: its summary, or while there is none, the same from what was recorded so far."""
    steps, summary = run.steps, run.summary
    last = steps[-1].step if steps else 0
    if summary and summary.steps < last:  # It was gone on with, and that is not over.
        summary = None
    rewards = [metrics.reward_mean for metrics in steps if metrics.reward_mean is not None]
    best = max(
        (item for item in run.evaluations if item.phase == "eval"), key=lambda item: item.reward_mean, default=None
    )
    planned = _setting(run.config, "grpo.max_steps")
    return {
        "state": _state(run, summary.stopped_early if summary else None, last, planned),
        "model": _setting(run.config, "model.name"),
        "data": _setting(run.config, "data.source"),
        "backend": summary.backend if summary else _setting(run.config, "server.backend") or "vllm",
        "placement": summary.placement if summary else run.placement.get("mode"),
        "steps": last,
        "max_steps": planned,
        "reward_first4": statistics.fmean(rewards[:4]) if rewards else None,
        "reward_last4": statistics.fmean(rewards[-4:]) if rewards else None,
        "eval_before": _evaluated(run, "eval_before"),
        "eval_after": _evaluated(run, "eval_after"),
        "best_step": summary.best_step if summary and summary.best_step is not None else best and best.step,
        "best_reward": summary.best_reward if summary and summary.best_step is not None else best and best.reward_mean,
        "wall_s": summary.wall_s if summary else None,
        "steps_s": sum(map(_seconds, steps)) or None,
        "restarts": summary.restarts if summary else None,
        "proof": Counter(metrics.proof for metrics in steps if metrics.proof),
    }


def columns(steps: Sequence[StepMetrics]) -> dict[str, list[Any]]:
    """Figure -> its value at each step; figures that have none are left out. Six digits are kept."""
    table = {name: [_short(getattr(metrics, name)) for metrics in steps] for name in StepMetrics.__struct_fields__}
    return {name: values for name, values in table.items() if any(value is not None for value in values)}


def sample_table(samples: Sequence[Sample]) -> dict[str, Any]:
    """Samples in the order of their steps, with each prompt once."""
    prompts: dict[str, int] = {}
    rows = [
        {
            "phase": sample.phase,
            "step": sample.step,
            "version": sample.version,
            "prompt": prompts.setdefault(visible(sample.prompt), len(prompts)),
            "completion": visible(sample.completion),
            "answer": None if sample.answer is None else visible(sample.answer),
            "reward": _short(sample.reward),
            "rewards": {visible(name): _short(score) for name, score in sample.rewards.items()},
            "finish": sample.finish_reason and visible(sample.finish_reason),
        }
        for sample in samples
    ]
    return {"prompts": list(prompts), "samples": rows}


def config_text(run: RunFiles) -> str:
    """config.toml as it stands; without what looks like a key, which does not belong on a page that is shared."""
    shown = _without_secrets(run.config)
    return run.config_text if shown == run.config else write_toml(shown)


def differing(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Settings that are not the same in all runs: their dotted key, and each run's value as TOML; None if not set."""
    settings = [flat(_without_secrets(run.config)) for run in runs]
    return [
        {"key": visible(key), "values": [None if value is None else visible(value) for value in values]}
        for key in dict.fromkeys(chain.from_iterable(settings))
        if key not in _NAMES and len(set(values := [each.get(key) for each in settings])) > 1
    ]


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """Dotted key -> value as TOML, of tables and of lists of tables."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{path}{key}"
        match value:
            case Mapping():
                found |= flat(value, f"{name}.")
            case [Mapping(), *_]:
                found |= flat({str(index): item for index, item in enumerate(value)}, f"{name}.")
            case _:
                found[name] = write_toml({"x": value}).removeprefix("x = ").strip()
    return found


def _state(run: RunFiles, stopped_early: bool | None, last: int, planned: Any) -> str:  # noqa: FBT001 - of Summary
    summed_up = run.summary is not None and run.summary.steps >= last
    if run.running and not (summed_up and isinstance(planned, int) and last >= planned):  # A notebook may look at it.
        return "going on"
    if stopped_early is None:
        return "unfinished" if last else "not begun"
    if stopped_early:
        return "stopped early"
    return "interrupted" if isinstance(planned, int) and last < planned else "finished"


def _evaluated(run: RunFiles, phase: str) -> float | None:
    return next((_short(item.reward_mean) for item in reversed(run.evaluations) if item.phase == phase), None)


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return visible(_without_secrets(value)) if isinstance(value, str) else value


def _seconds(metrics: StepMetrics) -> float:
    """What is recorded of a step's time."""
    parts = (metrics.rollout_s, metrics.train_s, metrics.sleep_s, metrics.wake_s, (metrics.publish_ms or 0) / 1000)
    return sum(part or 0 for part in parts)


def _short(value: Any) -> Any:
    """A float with six significant digits."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _without_secrets(value: Any, key: str = "", *, hidden: bool = False) -> Any:
    """A setting, with another text for each that looks secret. hidden: it is part of one that does."""
    hidden = hidden or key == _VARIABLES or _SECRET.search(key) is not None
    if isinstance(value, Mapping):
        return {name: _without_secrets(item, name, hidden=hidden) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, key, hidden=hidden) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if hidden:
        return _HIDDEN
    return _PARAMETER.sub(_without_a_secret, _IN_ADDRESS.sub(_HIDDEN, value))


def _without_a_secret(parameter: re.Match[str]) -> str:
    name = parameter[1]
    return f"{name}={_HIDDEN}" if _SECRET.search(name) else parameter[0]
