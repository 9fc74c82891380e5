"""The folder that an export goes to: nothing of anybody else is lost in it, and it is whole or not there."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bridge.errors import ConfigError

RECORD = "tandem_export.json"
"""Lists the files that an export wrote, so that the next one knows what is its own to replace."""


def require_place(out: Path, *, force: bool) -> None:
    """Raise ConfigError unless an export may go there. force: an earlier export may be replaced."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"{out} is no folder.", remedy="Name one that does not exist yet.")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise ConfigError(
            f"{out} is not empty.",
            remedy="Name another folder; --force replaces what an earlier export wrote, and nothing else.",
        )
    if not _written(out):
        raise ConfigError(f"No export wrote {out}, so nothing in it is replaced.", remedy="Name another folder.")


def replace_folder(aside: Path, out: Path, record: Mapping[str, object]) -> None:
    """Give a finished folder its place, in one rename; what others put beside an earlier export moves along.

    record: what to note of the export. Raises ConfigError when a new file has the name of somebody else's.
    """
    names = sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file())
    (aside / RECORD).write_text(json.dumps({**record, "files": [*names, RECORD]}, indent=1) + "\n", encoding="utf-8")
    _sync(aside)
    if not out.is_dir():
        aside.rename(out)
        return
    own = _written(out)
    for item in out.rglob("*"):
        name = str(item.relative_to(out))
        if name in own or (item.is_dir() and not item.is_symlink()):
            continue
        if (aside / name).exists():
            raise ConfigError(f"{out / name} was not written by an export, and is in the way.", remedy="Move it away.")
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(item, aside / name, follow_symlinks=False)
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    out.rename(old / out.name)
    aside.rename(out)
    shutil.rmtree(old)


def _written(out: Path) -> set[str]:
    """The files of a folder that an export wrote, by their names in it."""
    try:
        return set(json.loads((out / RECORD).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as written:
                os.fsync(written.fileno())
