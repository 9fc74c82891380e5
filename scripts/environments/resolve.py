"""Resolve requirement files into sections of the lock, with uv. Needs an index; downloads metadata alone."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

from environments.catalogue import PLATFORM, Source
from environments.errors import SetupError
from environments.failures import explain
from environments.lockfile import Section, source_digest
from environments.processes import run, tail
from environments.uv import environment, source_arguments

TIMEOUT_S = 900.0
_PIN = re.compile(r"^torch==(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Resolver:
    """Resolves with one uv; the log of each resolution stays in `logs`."""

    uv: Path
    root: Path
    logs: Path

    def resolve(self, source: Source, kept: Section | None) -> Section:
        """Resolve one section. Pins of `kept` stay where they still fit, so that a re-lock moves no more than it must.

        Raises:
            SetupError: no solution, or the index cannot be reached.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"lock-{source.key}.log"
        log.write_text("")
        with TemporaryDirectory() as scratch:
            chosen, listed = Path(scratch, "chosen.txt"), Path(scratch, "pylock.chosen.toml")
            if kept:
                chosen.write_text("".join(f"{name}=={version}\n" for name, version in kept.pins.items()))
            self._compile(source, log, ["--output-file", chosen])
            # A second pass lists the wheels of the versions chosen by the first, with sizes and hashes.
            self._compile(source, log, ["--constraints", chosen, "--format", "pylock.toml", "--output-file", listed])
            packages = tomllib.loads(listed.read_text())["packages"]
        return Section(
            environment=source.environment,
            accelerator=source.accelerator,
            python=source.python,
            source=source.requirements,
            overrides=source.overrides,
            source_digest=source_digest(source, self.root),
            platform=PLATFORM,
            download_bytes=sum(max(map(_size, package["wheels"])) for package in packages),
            packages=tuple(map(_line, packages)),
        )

    def dry_run(self, section: Section) -> None:
        """Have uv plan the installation of a section, for its own platform, without downloading its wheels.

        Raises:
            SetupError: a package has no such version or no fitting wheel.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"dry-run-{section.key}.log"
        log.write_text("")
        variables = environment()
        with TemporaryDirectory() as scratch:
            requirements = Path(scratch, "requirements.txt")
            requirements.write_text("\n".join((*section.packages, "")))
            command = [self.uv, "pip", "sync", "--dry-run", "--require-hashes", "--no-build", "--no-python-downloads"]
            command += ["--python-version", section.python, "--python-platform", section.platform]
            command += ["--target", Path(scratch, "target"), *source_arguments(section.pins.get("torch"), variables)]
            if run([*command, requirements], log=log, timeout_s=TIMEOUT_S, env=variables):
                raise explain(section.key, log)

    def _compile(self, source: Source, log: Path, output: list[str | Path]) -> None:
        requirements = self.root / source.requirements
        torch = _PIN.search(requirements.read_text())
        overrides = ["--overrides", self.root / source.overrides] if source.overrides else []
        variables = environment()
        command = [self.uv, "pip", "compile", requirements, *overrides, *output]
        command += ["--only-binary", ":all:", "--no-header", "--no-annotate", "--quiet", "--no-python-downloads"]
        command += ["--python-version", source.python, "--python-platform", PLATFORM]
        command += source_arguments(torch.group(1) if torch else None, variables)
        if run(command, log=log, timeout_s=TIMEOUT_S, env=variables):
            raise SetupError(
                f"cannot resolve {source.key}",
                why=" ".join(" ".join(tail(log)).split())[-600:],
                remedy=f"change {source.requirements} or its overrides",
                log=log,
            )


def _line(package: dict[str, Any]) -> str:
    hashes = sorted({wheel["hashes"]["sha256"] for wheel in package["wheels"]})
    return " ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{value}" for value in hashes)])


def _size(wheel: dict[str, Any]) -> int:
    if "size" in wheel:
        return int(wheel["size"])
    # A wheel from a local folder: uv gives its place but not its size.
    path = Path(unquote(urlsplit(wheel.get("url", "")).path) or wheel.get("path", ""))
    return path.stat().st_size if path.is_file() else 0
