#!/usr/bin/env python3
"""Say what is wrong with this machine or with the installation, and what to do about it.

    scripts/doctor.py            check the machine, the environments and their compiled parts
    scripts/doctor.py --json     the same as one JSON object; steps go to standard error
    scripts/doctor.py --smoke    then run a small training from end to end, in numbered steps

Exit status: 0 all is well, 1 there are warnings, 2 Tandem cannot run.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from environments import catalogue, installation, lockfile, machine, preflight, rehearsal
from environments.errors import SetupError
from environments.findings import Finding, exit_status
from environments.install import Plan

SMOKE_CONFIG = catalogue.ROOT / "configs" / "smoke.toml"


def main(argv: list[str] | None = None) -> int:
    """Print the report and return the exit status."""
    options = _parse(argv)
    findings = examine(options.accelerator, options.venvs, options.lock, options.python)
    status = exit_status(findings)
    if not options.json:
        _print(findings)
    if options.smoke and status < 2:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            status = max(status, rehearsal.rehearse(options.venvs, SMOKE_CONFIG))
    if options.json:
        print(json.dumps({"checks": [asdict(finding) for finding in findings], "status": status}, indent=1))
    return status


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check this machine and the installation.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--smoke", action="store_true", help="run a small training from end to end afterwards")
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), help="default: cuda where a GPU is visible")
    parser.add_argument("--python", type=Path, help="the Python that the environments are built with")
    parser.add_argument("--venvs", type=Path, default=catalogue.VENVS, help="where they stand (%(default)s)")
    parser.add_argument("--lock", type=Path, default=catalogue.LOCK, help="the lock (default: envs.lock)")
    return parser.parse_args(argv)


def examine(accelerator: str | None, venvs: Path, lock: Path, python: Path | None = None) -> list[Finding]:
    """All findings, the machine's first."""
    gpus: list[preflight.Gpu] | SetupError | None
    try:
        # As in set-up: a machine that is told to use its CPU may have a broken driver.
        gpus = None if accelerator == "cpu" else preflight.gpus()
    except SetupError as error:
        gpus = error
    found = accelerator or ("cuda" if gpus else "cpu")
    try:
        locked = lockfile.read(lock)
        plans = _plans(locked, found, venvs, python, gpu=isinstance(gpus, list) and bool(gpus))
    except SetupError as error:
        return [machine.refused("lock and Python", error)]
    sections = [plan.section for plan in plans]
    built = [installation.as_built(plan, locked) for plan in plans]
    return [*machine.check(sections, gpus, plans[0].python, venvs), *installation.check(built, found)]


def _plans(lock: lockfile.Lock, accelerator: str, venvs: Path, python: Path | None, *, gpu: bool) -> list[Plan]:
    plans = []
    for name in catalogue.DEFAULT:
        interpreter, version = preflight.find_python(lock, name, accelerator, python)
        section = lock.find(name, accelerator, version)
        assert section is not None, "find_python answers from the lock"
        environment = catalogue.ENVIRONMENTS[name]
        plans.append(Plan(environment, section, accelerator, interpreter, catalogue.ROOT, venvs, gpu))
    return plans


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = {"ok": "ok  ", "warning": "WARN", "failure": "FAIL"}[finding.status]
        print(f"{mark}  {finding.name:<{width}}  {finding.detail}")
        if finding.remedy:
            print(f"      {'':<{width}}  do: {finding.remedy}")


if __name__ == "__main__":
    sys.exit(main())
