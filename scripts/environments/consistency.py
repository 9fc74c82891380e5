"""What must hold in `envs.lock` beyond its form. Needs neither uv nor a network."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from environments.catalogue import ENVIRONMENTS, SOURCES, Source
from environments.lockfile import Lock, Section, source_digest

# Both sides of the bridge speak through these, so every environment has the same versions.
SHARED = ("pyzmq", "msgspec")
BUILD_BACKEND = "flit-core"


def problems(lock: Lock, root: Path, sources: Sequence[Source] = SOURCES) -> list[str]:
    """Everything that is wrong with a lock, one line each; empty when it is sound."""
    return [
        *_against_sources(lock, root, sources),
        *_shared_versions(lock),
        *(line for section in lock.sections.values() for line in _inside(section)),
    ]


def _against_sources(lock: Lock, root: Path, sources: Sequence[Source]) -> Iterator[str]:
    keys = {source.key for source in sources}
    yield from (f"[{key}] has no requirements any more" for key in lock.sections if key not in keys)
    for source in sources:
        section = lock.sections.get(source.key)
        if section is None:
            yield f"[{source.key}] is missing: run scripts/lock_envs.py write {source.environment}"
        elif section.source_digest != source_digest(source, root):
            yield (
                f"[{source.key}] is stale, {source.requirements} or its overrides changed: "
                f"run scripts/lock_envs.py write {source.environment}"
            )


def _shared_versions(lock: Lock) -> Iterator[str]:
    for package in SHARED:
        versions = {
            key: section.pins.get(package)
            for key, section in lock.sections.items()
            if section.environment in ENVIRONMENTS
        }
        if len(set(versions.values())) > 1:
            listed = ", ".join(f"{version} in {key}" for key, version in versions.items())
            yield f"{package} differs between the environments, which share the bridge: {listed}"


def _inside(section: Section) -> Iterator[str]:
    pins = section.pins
    if len(pins) != len(section.packages):
        yield f"[{section.key}] pins a package twice"
    if section.environment in ENVIRONMENTS and BUILD_BACKEND not in pins:
        yield f"[{section.key}] lacks {BUILD_BACKEND}, which builds Tandem's own packages"
    if section.accelerator == "cpu":
        if not pins.get("torch", "").endswith("+cpu"):
            yield f"[{section.key}] has torch {pins.get('torch')}, which is not the CPU build"
        cuda = [name for name in pins if name.startswith("nvidia-") and name != "nvidia-ml-py"]
        if cuda:
            yield f"[{section.key}] pulls CUDA packages: {', '.join(cuda)}"
    if section.environment == "dev" and "torch" in pins:
        yield f"[{section.key}] has torch, which no tool needs"
