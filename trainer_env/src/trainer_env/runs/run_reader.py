"""A run's files as somebody else reads them: while it is being written, after it was killed, or incomplete."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainer_env.runs import environment_record
from trainer_env.runs.environment_record import Environment
from trainer_env.runs.records import Evaluation, Sample, StepMetrics, Summary

T = TypeVar("T", bound=msgspec.Struct)


class RunFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's folder holds. Whatever is missing or cannot be read is empty or None."""

    name: str
    path: Path
    steps: list[StepMetrics] = []
    evaluations: list[Evaluation] = []
    samples: list[Sample] = []
    summary: Summary | None = None
    config_text: str = ""
    config: dict[str, Any] = {}
    placement: dict[str, Any] = {}
    environment: Environment | None = None
    running: bool = False
    """A trainer on this machine holds the run's lock."""
    unreadable: dict[str, int] = {}
    """File -> lines that are no records. The last line of a file that is being written is not counted."""

    def _repr_html_(self) -> str:
        from trainer_env.display.notebook_view import drawn

        return drawn(self.steps, self.evaluations)


def read_run(folder: Path) -> RunFiles:
    """Read all there is, and change nothing."""
    unreadable: dict[str, int] = {}

    def records(name: str, type_: type[T]) -> list[T]:
        found, bad = _lines(folder / name, type_)
        if bad:
            unreadable[name] = bad
        return found

    config_text = _text(folder / "config.toml")
    steps = {metrics.step: metrics for metrics in records("metrics.jsonl", StepMetrics)}
    return RunFiles(
        name=folder.resolve().name,
        path=folder.resolve(),
        steps=[steps[step] for step in sorted(steps)],
        evaluations=records("evaluations.jsonl", Evaluation),
        samples=records("samples.jsonl", Sample),
        summary=summary_of(folder),
        config_text=config_text,
        config=_toml(config_text),
        placement=_object(folder / "placement.json", dict) or {},
        environment=_object(folder / environment_record.FILE, Environment),
        running=_is_locked(folder / "trainer.lock"),
        unreadable=unreadable,
    )


def steps_taken(folder: Path) -> int:
    """Optimizer steps that the run has recorded."""
    return max((metrics.step for metrics in _lines(folder / "metrics.jsonl", StepMetrics)[0]), default=0)


def final_step(folder: Path) -> int:
    """The optimizer steps behind adapter/; 0: not known."""
    summary = summary_of(folder)
    return summary.steps if summary else steps_taken(folder)


def summary_of(folder: Path) -> Summary | None:
    """What its last trainer that came to an end wrote."""
    return _object(folder / "summary.json", Summary)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _lines(path: Path, type_: type[T]) -> tuple[list[T], int]:
    """The records of a file of one JSON object a line, and how many lines are none. A last line may be torn."""
    try:
        content = path.read_bytes()
    except OSError:
        return [], 0
    decoder, found, bad = msgspec.json.Decoder(type_), [], 0
    for line in content.splitlines(keepends=True):
        try:
            found.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            bad += line.endswith(b"\n")
    return found, bad


def _object(path: Path, type_: type[Any]) -> Any:
    """A file of one JSON object; None where there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _is_locked(path: Path) -> bool:
    """Whether a living process holds a lock on the file. Asking for the lock instead would keep a trainer out."""
    try:
        place = f":{path.stat().st_ino} "
        return any(place in line for line in Path("/proc/locks").read_text(encoding="ascii").splitlines())
    except OSError:
        return False
