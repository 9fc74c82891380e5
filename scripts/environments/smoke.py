"""Does a fresh environment work: its imports, and the list of its engine's options."""

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from environments.catalogue import SGLANG_CPU_PATH, Environment
from environments.errors import SetupError
from environments.processes import clean_environment, run, tail

OPTIONS_FILE = "engine_options.json"
TIMEOUT_S = 600.0

# Nothing here may reach for a network or report usage.
_QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
}


@dataclass(frozen=True)
class Outcome:
    """What was checked: `passed`, `written`, or why it was left out. `state` is what that depended on."""

    state: str
    imports: str
    options: str

    @property
    def notes(self) -> list[str]:
        """What the reader should know, one line each."""
        return [text for text in (self.imports, self.options) if text.startswith("skipped")]


def state(environment: Environment, accelerator: str, root: Path, *, gpu: bool) -> str:
    """What a check depends on beside the environment itself; a skipped check is tried again when it changes."""
    digest = hashlib.sha256(f"gpu={gpu}".encode() if accelerator == "cuda" else b"")
    if environment.engine == "sglang" and accelerator == "cpu":
        for path in sorted((root / SGLANG_CPU_PATH).rglob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def check(
    environment: Environment, accelerator: str, build: Path, root: Path, log: Path, *, gpu: bool, keep_open: int
) -> Outcome:
    """Import what matters, and write the engine's option list into `build`.

    Raises:
        SetupError: an import or the listing fails.
    """
    now = state(environment, accelerator, root, gpu=gpu)
    if accelerator == "cuda" and not gpu:
        why = "skipped: no GPU here; run this again on the GPU host"
        return Outcome(now, why, why if environment.engine else "none")
    variables = _variables(environment, accelerator, root)
    python = _Python(build, variables, log, keep_open)
    python.run("-c", f"import {', '.join(environment.imports)}", failure="its imports fail")
    if not environment.engine:
        return Outcome(now, "passed", "none")
    if environment.engine == "sglang" and accelerator == "cpu" and "PYTHONPATH" not in variables:
        why = f"skipped: the list of SGLang's options needs the stand-ins in {SGLANG_CPU_PATH}"
        return Outcome(now, "passed", why)
    script = Path(__file__).with_name("engine_options.py")
    aside = build / f".{OPTIONS_FILE}"
    python.run(script, environment.engine, aside, failure="its engine cannot list its options")
    aside.replace(build / OPTIONS_FILE)
    return Outcome(now, "passed", "written")


def _variables(environment: Environment, accelerator: str, root: Path) -> dict[str, str]:
    extra = dict(_QUIET)
    stand_ins = root / SGLANG_CPU_PATH
    if environment.engine == "sglang" and accelerator == "cpu":
        extra |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
        if stand_ins.is_dir():
            extra["PYTHONPATH"] = str(stand_ins)
    return clean_environment(extra)


@dataclass(frozen=True)
class _Python:
    """The Python of a build, run with its output in the build's log."""

    build: Path
    variables: Mapping[str, str]
    log: Path
    keep_open: int

    def run(self, *arguments: str | Path, failure: str) -> None:
        # Unsloth writes a cache into the working directory: give it one that goes away.
        with tempfile.TemporaryDirectory() as scratch:
            status = run(
                [self.build / "bin" / "python", *arguments],
                log=self.log,
                timeout_s=TIMEOUT_S,
                env=self.variables,
                cwd=Path(scratch),
                keep_open=self.keep_open,
            )
        if status:
            last = tail(self.log, 1)
            raise SetupError(
                f"{self.build.name} was installed, but {failure}",
                why=last[0].strip() if last else f"Python ended with status {status}",
                remedy="run scripts/doctor.py, and compare the machine with the limits in README.md",
                log=self.log,
            )
