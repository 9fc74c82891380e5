"""Build one environment at its final place from its section of the lock, then switch to it."""

import shutil
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environments import atomic, smoke
from environments.catalogue import Environment
from environments.errors import SetupError
from environments.failures import explain
from environments.lockfile import Lock, Section
from environments.locking import hold
from environments.processes import run
from environments.uv import environment as uv_environment
from environments.uv import source_arguments

# Part of every digest: raise it when an installation is made in another way, so that old ones are rebuilt.
RECIPE = "1"
INSTALL_TIMEOUT_S = 3600.0
LOCK_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Plan:
    """One environment to have: from which section, with which Python, where."""

    environment: Environment
    section: Section
    accelerator: str
    python: Path
    root: Path
    venvs: Path
    gpu: bool
    check: bool = True

    @property
    def digest(self) -> str:
        """Names the build by everything that goes into it."""
        # Environments hold absolute paths, and entry points are written at installation.
        own = "\n".join(_baked_in(self.root / name / "pyproject.toml") for name in self.environment.packages)
        return atomic.short_digest(RECIPE, self.section.digest, self.accelerator, str(self.build_root), own)

    @property
    def build_root(self) -> Path:
        """The folder in which environments stand, as an absolute path."""
        return self.venvs.absolute()

    @property
    def build(self) -> Path:
        """Where the environment is built and stays."""
        return self.build_root / f"{self.environment.name}-{self.digest}"

    @property
    def link(self) -> Path:
        """The name under which everything else finds it."""
        return self.build_root / self.environment.name


@dataclass(frozen=True)
class Result:
    """What was done; times in seconds. `notes` are lines for the reader."""

    built: bool
    install_s: float = 0.0
    check_s: float = 0.0
    notes: tuple[str, ...] = ()


def _baked_in(pyproject: Path) -> str:
    document = tomllib.loads(pyproject.read_text())
    project = document["project"]
    kept = [project["name"], project["version"], project.get("scripts", {}), document.get("tool", {})]
    return f"{pyproject.parent} {kept}"


def installed(environment: Environment, lock: Lock, root: Path, venvs: Path) -> Plan | None:
    """The plan of a build that is there and as the lock has it, for whichever accelerator and Python.

    Of several the one switched to; None when there is none. It is taken as it is: no check is due.
    """
    plans = [
        Plan(environment, section, section.accelerator, venvs / environment.name, root, venvs, gpu=False, check=False)
        for section in lock.sections.values()
        if section.environment == environment.name
    ]
    return next(iter(sorted(filter(is_complete, plans), key=_linked, reverse=True)), None)


def is_ready(plan: Plan) -> bool:
    """Whether the environment is complete, switched to, and has nothing left to check."""
    return _linked(plan) and is_complete(plan) and not _check_is_due(plan)


def _linked(plan: Plan) -> bool:
    return plan.link.is_symlink() and plan.link.readlink() == Path(plan.build.name)


def is_complete(plan: Plan) -> bool:
    """Whether the environment is built, be it the one switched to or not."""
    return is_whole(plan.build)


def is_whole(build: Path) -> bool:
    """Whether a build, or the link to it, was finished, of whichever lock."""
    return atomic.read_marker(build) is not None and (build / "bin" / "python").exists()


def _check_is_due(plan: Plan) -> bool:
    """A check that was left out is due again once what it lacked may have come."""
    last: dict[str, Any] = (atomic.read_marker(plan.build) or {}).get("check") or {}
    skipped = not last or any(str(value).startswith("skipped") for value in last.values())
    now = smoke.state(plan.environment, plan.accelerator, plan.root, gpu=plan.gpu)
    return plan.check and skipped and last.get("state") != now


def install(plan: Plan, uv: Path) -> Result:
    """Make the environment exist. Safe to interrupt, to repeat and to run twice at once.

    Raises:
        SetupError: with the cause that uv or an import gave.
    """
    with hold(plan.build_root / ".locks" / f"{plan.environment.name}.lock", timeout_s=LOCK_TIMEOUT_S) as descriptor:
        if is_ready(plan):
            return Result(built=False)
        if plan.link.exists() and not plan.link.is_symlink():
            raise SetupError(
                f"{plan.link} is in the way",
                why="it is a folder that this script did not make",
                remedy="move it aside, or choose another place with TANDEM_VENVS",
            )
        if is_complete(plan) and not _check_is_due(plan):
            _switch(plan)
            return Result(built=False)
        began = time.monotonic()
        log = atomic.new_log(plan.build_root, plan.environment.name)
        built = not is_complete(plan)
        if built:
            _build(plan, uv, log, descriptor)
        installed = time.monotonic()
        outcome = None
        if plan.check:
            outcome = smoke.check(
                plan.environment,
                plan.accelerator,
                plan.build,
                plan.root,
                log,
                gpu=plan.gpu,
                keep_open=descriptor,
            )
        checked = time.monotonic()
        atomic.write_marker(
            plan.build,
            {
                "environment": plan.environment.name,
                "accelerator": plan.accelerator,
                "python": plan.section.python,
                "section": plan.section.key,
                "digest": plan.digest,
                "install_s": round(installed - began, 1),
                "check": asdict(outcome) if outcome else None,
                "check_s": round(checked - installed, 1),
            },
        )
        _switch(plan)
    return Result(built, installed - began, checked - installed, tuple(outcome.notes) if outcome else ())


def _switch(plan: Plan) -> None:
    atomic.point(plan.link, plan.build)
    atomic.remove_stale(plan.link, plan.build)


def _build(plan: Plan, uv: Path, log: Path, descriptor: int) -> None:
    shutil.rmtree(plan.build, ignore_errors=True)
    variables = uv_environment()
    requirements = plan.build / "requirements.txt"

    def call(*arguments: str | Path) -> None:
        status = run([uv, *arguments], log=log, timeout_s=INSTALL_TIMEOUT_S, env=variables, keep_open=descriptor)
        if status:
            raise explain(plan.environment.name, log)

    python = plan.build / "bin" / "python"
    call("venv", "--quiet", "--no-python-downloads", "--python", plan.python, plan.build)
    requirements.write_text("\n".join((*plan.section.packages, "")))
    where = source_arguments(plan.section.pins.get("torch"), variables)
    call("pip", "sync", "--python", python, "--require-hashes", "--no-build", *where, requirements)
    editable = [word for name in plan.environment.packages for word in ("--editable", plan.root / name)]
    offline = ("--offline", "--no-index", "--no-deps", "--no-build-isolation")
    call("pip", "install", "--python", python, *offline, *editable)
