#!/usr/bin/env python3
"""Make and check `envs.lock`.

    scripts/lock_envs.py write [NAME ...]   resolve again, keeping the pins that still fit (needs an index)
    scripts/lock_envs.py write --upgrade    the same, moving every pin that is free to its newest version
    scripts/lock_envs.py check              stale sections, shared versions, CUDA in a CPU section (offline)
    scripts/lock_envs.py dry-run [NAME ...] what an install would do, for machines that cannot run it (needs an index)
    scripts/lock_envs.py show NAME          print the pins of an environment, or of one section

NAME is an environment (`trainer`) or a section (`trainer.cpu.py311`).
"""

import argparse
import sys
from pathlib import Path

from environments import catalogue, lockfile
from environments.consistency import problems
from environments.errors import SetupError
from environments.processes import stop_on_signals
from environments.resolve import Resolver
from environments.uv import find_or_install


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command; exit status 0, 1 (check found something) or 2 (could not be done)."""
    options = _parse(argv)
    try:
        return {"write": _write, "check": _check, "dry-run": _dry_run, "show": _show}[options.command](options)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make and check envs.lock.")
    parser.add_argument("--lock", type=Path, default=catalogue.LOCK, help="the lock (default: envs.lock)")
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="resolve again (needs an index)")
    write.add_argument("names", nargs="*", metavar="NAME", help="environment or section (default: all)")
    write.add_argument("--upgrade", action="store_true", help="move free pins to their newest version")
    commands.add_parser("check", help="say what is stale or inconsistent")
    dry_run = commands.add_parser("dry-run", help="what an install would do (needs an index)")
    dry_run.add_argument("names", nargs="*", metavar="NAME", help="environment or section (default: all)")
    show = commands.add_parser("show", help="print pins")
    show.add_argument("name", metavar="NAME", help="environment or section")
    return parser.parse_args(argv)


def _matches(key: str, name: str) -> bool:
    return key == name or key.startswith(f"{name}.")


def _write(options: argparse.Namespace) -> int:
    known = {source.key: source for source in catalogue.SOURCES}
    for name in options.names:
        if not any(_matches(key, name) for key in known):
            raise SetupError(f"unknown name {name}", why="no such section", remedy=f"choose from {', '.join(known)}")
    before = dict(lockfile.read(options.lock).sections) if options.lock.exists() else {}
    uv = find_or_install(lockfile.Lock(before), catalogue.VENVS)
    resolver = Resolver(uv, catalogue.ROOT, catalogue.VENVS / "logs")
    sections: list[lockfile.Section] = []
    for key, source in known.items():
        kept = before.get(key)
        if kept and options.names and not any(_matches(key, name) for name in options.names):
            sections.append(kept)
            continue
        section = resolver.resolve(source, None if options.upgrade else kept)
        moved = _differences(kept, section)
        print(f"{key}: {len(section.packages)} packages, {len(moved)} changed", *moved, sep="\n  ", flush=True)
        sections.append(section)
    aside = options.lock.with_suffix(".lock.new")
    aside.write_text(lockfile.render(sections))
    aside.replace(options.lock)
    return _check(options)


def _differences(old: lockfile.Section | None, new: lockfile.Section) -> list[str]:
    before, after = old.pins if old else {}, new.pins
    return [
        f"{name} {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in sorted(before.keys() | after.keys())
        if old and before.get(name) != after.get(name)
    ]


def _check(options: argparse.Namespace) -> int:
    lock = lockfile.read(options.lock)
    found = problems(lock, catalogue.ROOT)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{options.lock.name}: {len(lock.sections)} sections, all up to date")
    return 1 if found else 0


def _dry_run(options: argparse.Namespace) -> int:
    lock = lockfile.read(options.lock)
    resolver = Resolver(find_or_install(lock, catalogue.VENVS), catalogue.ROOT, catalogue.VENVS / "logs")
    for key, section in lock.sections.items():
        if not options.names or any(_matches(key, name) for name in options.names):
            resolver.dry_run(section)
            print(f"{key}: {len(section.packages)} packages have a wheel for {section.platform}", flush=True)
    return 0


def _show(options: argparse.Namespace) -> int:
    lock = lockfile.read(options.lock)
    chosen = [section for key, section in lock.sections.items() if _matches(key, options.name)]
    if not chosen:
        raise SetupError(
            f"unknown name {options.name}", why="no such section", remedy=f"choose from {', '.join(lock.sections)}"
        )
    for section in chosen:
        print(f"# {section.key}: {len(section.packages)} packages, {section.download_bytes / 1e9:.2f} GB")
        print(*(f"{name}=={version}" for name, version in section.pins.items()), sep="\n")
    return 0


if __name__ == "__main__":
    stop_on_signals()
    sys.exit(main())
