"""Build Tandem's isolated environments from envs.lock. Run it through scripts/setup_envs.sh."""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environments import catalogue, install, kernel, lockfile, preflight
from environments.console import say
from environments.errors import Interrupted, SetupError
from environments.processes import stop_on_signals
from environments.uv import find_or_install

_ACCELERATOR = "default: cuda where a GPU is visible; any: as it is installed already, for whichever of the two"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 all environments are ready, 1 something failed, 130 interrupted."""
    options = _parse(argv)
    stop_on_signals()
    began = time.monotonic()
    missing: list[install.Plan] = []
    failed: Sequence[SetupError]
    try:
        plans = _plans(options)
        missing = [plan for plan in plans if not install.is_ready(plan)]
        for plan in plans:
            if plan not in missing:
                say(f"{plan.environment.name}: up to date ({plan.section.key})")
        failed = _install(missing, options) if missing else []
        if options.notebook and not failed:
            say(f"notebooks: kernel {kernel.register(options.venvs.absolute())}")
    except SetupError as error:
        failed = [error]
    for error in failed:
        print(f"error: {error}", file=sys.stderr)
    if not failed and missing:
        say(f"all ready in {time.monotonic() - began:.1f} s")
    if any(isinstance(error, Interrupted) for error in failed):
        return 130
    return 1 if failed else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = list(catalogue.ENVIRONMENTS)
    parser = argparse.ArgumentParser(prog="setup_envs.sh", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--dev", action="store_true", help="the development environment as well")
    parser.add_argument("--notebook", action="store_true", help="make the trainer's environment a Jupyter kernel")
    parser.add_argument("--accelerator", choices=("cpu", "cuda", "any"), help=_ACCELERATOR)
    parser.add_argument("--python", type=Path, help="the Python to build with (default: one that the lock names)")
    parser.add_argument("--venvs", type=Path, default=catalogue.VENVS, help="where to build (%(default)s)")
    parser.add_argument("--lock", type=Path, default=catalogue.LOCK, help="the lock (default: envs.lock)")
    parser.add_argument("--skip-check", action="store_true", help="do not import what was installed")
    return parser.parse_args(argv)


def _plans(options: argparse.Namespace) -> list[install.Plan]:
    lock = lockfile.read(options.lock)
    chosen: list[str] = [*(options.only or catalogue.DEFAULT), *(["dev"] if options.dev else [])]
    if options.notebook and "trainer" not in chosen:
        chosen.append("trainer")
    names = list(dict.fromkeys(chosen))
    if options.accelerator != "any":
        return _plans_for(names, lock, options.accelerator, options)
    plans, missing = [], []
    for name in names:
        plan = install.installed(catalogue.ENVIRONMENTS[name], lock, catalogue.ROOT, options.venvs)
        if not (plan and install.is_ready(plan)) and install.is_whole(options.venvs / name):
            say(f"{name}: as it is installed, of an older lock")
        elif plan:
            plans.append(plan)
        else:
            missing.append(name)
    return plans + (_plans_for(missing, lock, None, options) if missing else [])


def _plans_for(
    names: list[str], lock: lockfile.Lock, wanted: str | None, options: argparse.Namespace
) -> list[install.Plan]:
    # A machine that is told to use its CPU may have a broken driver: do not ask it.
    gpus = [] if wanted == "cpu" or names == ["dev"] else preflight.gpus()
    accelerator = wanted or ("cuda" if gpus else "cpu")
    plans = []
    for name in names:
        python, version = preflight.find_python(lock, name, accelerator, options.python)
        section = lock.find(name, accelerator, version)
        assert section is not None, "find_python answers from the lock"
        preflight.check_platform(section)
        if gpus and accelerator == "cuda":
            preflight.check_driver(section, gpus[0].driver)
        plans.append(
            install.Plan(
                environment=catalogue.ENVIRONMENTS[name],
                section=section,
                accelerator=section.accelerator,
                python=python,
                root=catalogue.ROOT,
                venvs=options.venvs,
                gpu=bool(gpus),
                check=not options.skip_check,
            )
        )
    return plans


def _install(plans: list[install.Plan], options: argparse.Namespace) -> Sequence[SetupError]:
    preflight.check_disk((plan.section for plan in plans if not plan.build.exists()), options.venvs)
    uv = find_or_install(lockfile.read(options.lock), options.venvs.absolute())
    failed: list[SetupError] = []
    with ThreadPoolExecutor(max_workers=len(plans)) as pool:
        for plan, future in [(plan, pool.submit(_one, plan, uv)) for plan in plans]:
            error = future.exception()
            if isinstance(error, SetupError):
                failed.append(error)
            elif error:
                raise error
            else:
                _report(plan, future.result())
    # Once interrupted, every environment fails alike: say it once.
    return next(([error] for error in failed if isinstance(error, Interrupted)), failed)


def _one(plan: install.Plan, uv: Path) -> install.Result:
    if not install.is_complete(plan):
        gigabytes = plan.section.download_bytes / 1e9
        name, count = plan.environment.name, len(plan.section.packages)
        say(f"{name}: {plan.section.key}, {count} packages, {gigabytes:.1f} GB of wheels")
    return install.install(plan, uv)


def _report(plan: install.Plan, result: install.Result) -> None:
    if not (result.built or result.check_s):
        say(f"{plan.environment.name}: ready, built before ({plan.section.key})")
        return
    times = f"installed in {result.install_s:.1f} s, checked in {result.check_s:.1f} s"
    say(f"{plan.environment.name}: ready, {times}", *(f"  {note}" for note in result.notes))


if __name__ == "__main__":
    sys.exit(main())
