"""The folder that an export goes to: nothing of anybody else is lost in it, and it is whole or not there."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from bridge.errors import ConfigError

RECORD = "tandem_export.json"
"""Lists the files that an export wrote, so that the next one knows what is its own to replace."""


def require_place(out: Path, *, force: bool) -> None:
    """Raise ConfigError unless an export may go there. force: an earlier export may be replaced."""
    if Path.cwd().is_relative_to(out.resolve()):
        raise ConfigError(
            f"{out} is the working directory, or has it inside.",
            why="A finished export takes the place of the whole folder.",
            remedy="Name a folder in it, or go elsewhere.",
        )
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
    """Give a finished folder its place; what others put beside an earlier export moves along.

    The earlier one is put back when the new one cannot take its place.
    record: what to note of the export. Raises ConfigError when a new file has the name of somebody else's.
    """
    names = sorted(str(file.relative_to(aside)) for file in aside.rglob("*") if file.is_file())
    (aside / RECORD).write_text(json.dumps({**record, "files": [*names, RECORD]}, indent=1) + "\n", encoding="utf-8")
    _sync(aside)
    if not out.is_dir():
        aside.rename(out)
        return
    _keep_others(out, aside, _written(out))
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        out.rename(old / out.name)
        aside.rename(out)
    except BaseException:
        if not out.exists():
            (old / out.name).rename(out)
        raise
    finally:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)


def _keep_others(out: Path, aside: Path, own: Collection[str]) -> None:
    """Have all that is in out, but for an export's own files, in aside as well: files are linked, folders made anew.

    Raises ConfigError for a name that is taken.
    """
    shared = {folder for name in own for folder in Path(name).parents}
    folders = [Path()]
    for place, inner, files in os.walk(out, onerror=_raise):
        for item in (Path(place, name) for name in (*inner, *files)):
            name = item.relative_to(out)
            is_folder = item.is_dir() and not item.is_symlink()
            folders += [name] if is_folder else []
            if str(name) in own or (is_folder and name in shared):
                continue
            if (aside / name).exists() and not (is_folder and (aside / name).is_dir()):
                raise ConfigError(f"{item} was not written by an export, and is in the way.", remedy="Move it away.")
            (aside / name if is_folder else (aside / name).parent).mkdir(parents=True, exist_ok=True)
            if not is_folder:
                os.link(item, aside / name, follow_symlinks=False)
    for folder in reversed(folders):
        if (aside / folder).is_dir():
            shutil.copymode(out / folder, aside / folder)


def _raise(error: OSError) -> None:
    raise error


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
