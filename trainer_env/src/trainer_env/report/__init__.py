"""The report of runs: one HTML page with its data, style and scripts inside, that asks no one for anything."""

import base64
import hashlib
import html
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from bridge.errors import ConfigError
from trainer_env.arguments import version
from trainer_env.report.report_data import differing, run_data, visible
from trainer_env.runs.jsonl import write_atomically
from trainer_env.runs.run_reader import RunFiles, read_run

_PARTS = Path(__file__).with_name("report_page")
_SCRIPTS = ("base.js", "scales.js", "chart.js", "curves.js", "overview.js", "samples.js", "settings.js", "start.js")
"""In the order in which they build on one another."""
FILE = "report.html"
SAMPLE_BYTES = 2_500_000
"""About what the samples of all runs together may take of the page."""


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of some runs' folders; where it is. out: default: report.html in the first one.

    Raises ConfigError where there is no folder for it, and BridgeError for a disk that refuses.
    """
    # By its path, so that a run that is named twice is shown once.
    runs = list({folder.resolve(): read_run(folder) for folder in folders}.values())
    path = Path(out) if out else folders[0] / FILE
    if path.is_dir():
        path /= FILE
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.", remedy="Make it first.")
    write_atomically(path, page(runs))
    return path


def page(runs: Sequence[RunFiles]) -> bytes:
    """The page, in UTF-8. Nothing that a model or a user wrote becomes markup: it is data, shown as text."""
    labels = run_labels(runs)
    data = {
        "made": datetime.now().astimezone().isoformat(timespec="seconds"),
        "tandem": version(),
        "runs": [
            run_data(run, label=label, sample_bytes=SAMPLE_BYTES // len(runs))
            for run, label in zip(runs, labels, strict=True)
        ],
        "differing": differing(runs) if len(runs) > 1 else [],
    }
    style, script = _part("style.css"), "\n".join(map(_part, _SCRIPTS))
    parts = {
        "<!--policy-->": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'",
        "/*style*/": style,
        "/*script*/": script,
        "/*data*/": msgspec.json.encode(data).decode().replace("<", "\\u003c"),  # No tag can end or begin in it.
        "<!--title-->": html.escape(visible(", ".join(labels))),
    }
    text = _part("page.html")
    for mark, content in parts.items():
        before, _, after = text.partition(mark)
        text = before + content + after
    return text.encode()


def run_labels(runs: Sequence[RunFiles]) -> list[str]:
    """What to call each run: its name, and of its path as much before that as tells it from those of the same name."""
    return [_label(run, [other for other in runs if other.name == run.name]) for run in runs]


def _label(run: RunFiles, alike: Sequence[RunFiles]) -> str:
    """alike: the runs of that name, itself among them."""
    if len(alike) == 1:
        return run.name
    before = run.path.parent.parts
    for count in range(1, len(before)):
        if sum(other.path.parent.parts[-count:] == before[-count:] for other in alike) == 1:
            return "/".join((*before[-count:], run.name))
    return str(run.path)


def _part(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a content security policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
