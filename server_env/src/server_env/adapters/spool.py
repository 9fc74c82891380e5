"""Adapter files while the engine may read them: written whole or not at all, owned by the server alone."""

import errno
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from bridge.digest import digest
from bridge.endpoint import private_dir
from bridge.errors import Refused

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


class Spool:
    """A private folder with one subfolder a version. All methods block: call them off the event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = private_dir(folder)

    def write(self, name: str, data: memoryview, expected: str, config: Mapping[str, Any]) -> Path:
        """Write `name/` in PEFT's format and check the digest. Raises Refused for other bytes or a full disk."""
        aside, final = self.folder / f".{name}", self.folder / name
        try:
            aside.mkdir(mode=0o700)
            with ThreadPoolExecutor(1) as beside:
                writing = beside.submit(_write, aside / WEIGHTS, data)
                found = digest(data)
                writing.result()
            if found != expected:
                raise Refused(
                    "The adapter's bytes were changed on their way: "
                    f"their digest is {found[:12]}…, not {expected[:12]}….",
                    remedy="Publish it again; if it happens again, look for a broken disk or memory on either host.",
                )
            _write(aside / CONFIG, msgspec.json.format(msgspec.json.encode(config)))
            aside.rename(final)
        except (Refused, OSError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            if isinstance(error, Refused) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise Refused(
                f"There is no room for {len(data)} bytes of adapter in {self.folder}: {error.strerror}.",
                why="Adapters lie in memory or on disk while the engine reads them. The last version still serves.",
                remedy="Free some space there, or set server.spool_dir to a folder with more.",
            ) from None
        return final

    def delete(self, path: Path) -> None:
        """Remove a version's files."""
        shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the whole spool."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _write(path: Path, data: bytes | memoryview) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
