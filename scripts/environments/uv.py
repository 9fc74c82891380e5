"""Find uv, or install the locked one through pip into an environment of its own; speak to it."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from environments import atomic, catalogue
from environments.errors import SetupError
from environments.lockfile import Lock
from environments.locking import hold
from environments.processes import clean_environment, run, tail

# The oldest uv with everything that is used here: pylock output, excluded builds, hash-checked sync.
OLDEST = (0, 8, 0)
PIP_TIMEOUT_S = 600.0
# The oldest pip that installs into another environment (`pip --python`).
_OLDEST_PIP = (22, 3)

# pip's settings for mirrors and air-gapped hosts, and what uv calls them.
_SPELLING = {
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
    "PIP_TRUSTED_HOST": "UV_INSECURE_HOST",
    "PIP_DEFAULT_TIMEOUT": "UV_HTTP_TIMEOUT",
    "PIP_CERT": "SSL_CERT_FILE",
    "PIP_CLIENT_CERT": "SSL_CLIENT_CERT",
    "PIP_PROXY": "ALL_PROXY",
}
_SYSTEM_CERTIFICATES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
# Where PyTorch lists its CPU wheels: a page of links, so that nothing but torch is looked up there. TANDEM_TORCH_LINKS
# names another page or folder; empty, it means none.
_CPU_TORCH = "https://download.pytorch.org/whl/cpu/torch/"


def settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Spell pip's settings in `variables` as uv does; where uv's own is set, that one wins."""
    found = {
        ours: variables[theirs]
        for theirs, ours in _SPELLING.items()
        if variables.get(theirs) and not variables.get(ours)
    }
    if "UV_FIND_LINKS" in found:  # pip has spaces between several, uv commas
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    # pip trusts the certificates of the system; uv brings its own unless told otherwise.
    if any(Path(bundle).exists() for bundle in _SYSTEM_CERTIFICATES):
        found.setdefault("UV_SYSTEM_CERTS", variables.get("UV_SYSTEM_CERTS", "1"))
    # Every pin carries hashes, so it does not matter which index serves the file: look at all, as pip does.
    found.setdefault("UV_INDEX_STRATEGY", variables.get("UV_INDEX_STRATEGY", "unsafe-best-match"))
    return found


def environment() -> dict[str, str]:
    """The environment variables for a call of uv."""
    return clean_environment(settings(os.environ))


def source_arguments(torch_version: str | None, variables: Mapping[str, str]) -> list[str]:
    """Arguments that say where uv may look: not at an index where pip is told so, at PyTorch's page for a CPU torch.

    That page is left out where the find-links already hold that torch.
    """
    if variables.get("PIP_NO_INDEX", "0").lower() not in ("0", "false", "no", "off", ""):
        return ["--no-index"]
    if not torch_version or not torch_version.endswith("+cpu"):
        return []
    links = variables.get("UV_FIND_LINKS") or variables.get("PIP_FIND_LINKS") or ""
    for folder in re.split(r"[\s,]+", links):
        path = Path(folder.removeprefix("file://"))
        if folder and path.is_dir() and any(path.glob(f"torch-{torch_version}-*.whl")):
            return []
    page = variables.get("TANDEM_TORCH_LINKS", _CPU_TORCH)
    return ["--find-links", page] if page else []


def find_or_install(lock: Lock | None, venvs: Path) -> Path:
    """The path of a usable uv: `TANDEM_UV`, one on PATH, or the locked one in `<venvs>/.uv`.

    Raises:
        SetupError: pip cannot install it.
    """
    named = os.environ.get("TANDEM_UV")
    if named:
        return Path(named)
    found = shutil.which("uv")
    if found and _version(found) >= OLDEST:
        return Path(found)
    return _install(_requirement(lock), venvs)


def _version(program: str) -> tuple[int, ...]:
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=30).stdout
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", answer)
    return tuple(int(part) for part in match.groups()) if match else (0,)


def _requirement(lock: Lock | None) -> str:
    for section in lock.sections.values() if lock else ():
        if section.environment == catalogue.UV:
            return "\n".join(section.packages)
    # Only on the way to the very first lock.
    return (catalogue.ROOT / "scripts/environments/uv.in").read_text()


def _install(requirement: str, venvs: Path) -> Path:
    digest = atomic.short_digest(requirement, sys.version.split()[0])
    built = venvs / f".uv-{digest}"
    program = built / "bin" / "uv"
    link = venvs / ".uv"
    if atomic.read_marker(built) and program.exists():
        return program
    with hold(venvs / ".locks" / "uv.lock", timeout_s=PIP_TIMEOUT_S) as descriptor:
        if not (atomic.read_marker(built) and program.exists()):
            _build(built, requirement, venvs, descriptor)
        atomic.point(link, built)
        atomic.remove_stale(link, built)
    return program


def _pip() -> tuple[int, ...]:
    """The version of this Python's pip, which saves bootstrapping one for some seconds; (0,) where it has none."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("pip"))))
    except importlib.metadata.PackageNotFoundError:
        return (0,)


def _build(built: Path, requirement: str, venvs: Path, descriptor: int) -> None:
    shutil.rmtree(built, ignore_errors=True)
    log = atomic.new_log(venvs, "uv")
    has_pip = _pip() >= _OLDEST_PIP
    python = built / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
    try:
        venv.create(built, with_pip=not has_pip)
    except (subprocess.CalledProcessError, OSError) as error:
        raise SetupError(
            "cannot make a virtual environment for uv",
            why=f"{error}; the ensurepip of {sys.executable} does not work or {venvs} is not writable",
            remedy="install python3-venv, or put uv on PATH yourself",
        ) from error
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(requirement)
        listed.flush()
        hashes = ["--require-hashes"] if "--hash" in requirement else []
        command = [*pip, "install", "--no-deps", "--only-binary", ":all:", *hashes, "--requirement", listed.name]
        status = run(command, log=log, timeout_s=PIP_TIMEOUT_S, keep_open=descriptor)
    if status:
        last = tail(log, 1)
        raise SetupError(
            "pip could not install uv",
            why=last[0] if last else f"it ended with status {status}",
            remedy="set PIP_INDEX_URL to a reachable index, or put uv on PATH yourself",
            log=log,
        )
    atomic.write_marker(built, {"requirement": requirement.split(" ", maxsplit=1)[0]})
