"""What a run has recorded so far, read without touching it: it may be going on."""

from pathlib import Path
from typing import TypeVar

import msgspec

from trainer_env.records import Evaluation, Sample, StepMetrics, Summary

T = TypeVar("T", bound=msgspec.Struct)


class History(msgspec.Struct, frozen=True):
    """The lines of a run's files, oldest first. summary: once it has ended."""

    run_dir: Path
    steps: list[StepMetrics]
    samples: list[Sample]
    evaluations: list[Evaluation]
    summary: Summary | None

    @classmethod
    def of(cls, run_dir: Path) -> "History":
        """Read a run's folder; files that are not there yet count as empty."""
        summary = run_dir / "summary.json"
        return cls(
            run_dir,
            read_lines(run_dir / "metrics.jsonl", StepMetrics),
            read_lines(run_dir / "samples.jsonl", Sample),
            read_lines(run_dir / "evaluations.jsonl", Evaluation),
            msgspec.json.decode(summary.read_bytes(), type=Summary) if summary.is_file() else None,
        )

    def _repr_html_(self) -> str:
        from trainer_env.notebook_view import drawn

        return drawn(self.steps, self.evaluations)


def read_lines(path: Path, type_: type[T]) -> list[T]:
    """The records of a JSON-lines file. A last line that is being written, or was cut off, is left out."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    return msgspec.json.Decoder(type_).decode_lines(whole)
