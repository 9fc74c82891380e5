"""A small training from end to end, watched step by step. The first step that is not reached ends it.

What a step leaves behind shows that it was reached: files in the run's folder, never words on a screen.
"""

import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from environments import catalogue
from environments.processes import clean_environment, tail

MARK = "TANDEM_SMOKE"
IMPORT_S, CHECK_S, STEP_S = 300.0, 120.0, 600.0
POLL_S = 0.1
BACKENDS = ("vllm", "sglang")
LOGS = ("errors", "run/smoke/trainer.log", "run/smoke/engine.log", "run/smoke/server.log")


class Failed(Exception):
    """A step was not reached. The text says why."""


def rehearse(venvs: Path, config: Path) -> int:
    """Print the numbered steps; 0 when all are reached, else 2, and then the run's folder is kept if it has logs."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-smoke-"))
    rehearsal = Rehearsal(venvs.absolute(), config.absolute(), folder)
    try:
        rehearsal.run()
    except Failed as failure:
        print(f"FAILED ({failure})")
        if any(folder.iterdir()):
            print(f"   logs: {folder}")
        else:
            folder.rmdir()
        return 2
    finally:
        rehearsal.end()
    shutil.rmtree(folder, ignore_errors=True)
    return 0


class Rehearsal:
    """One training of config in folder, by the environments in venvs; the server's is the first that is there."""

    def __init__(self, venvs: Path, config: Path, folder: Path) -> None:
        self._venvs = venvs
        self._folder = folder
        self._run_dir = folder / "run" / "smoke"
        self._mark = uuid.uuid4().hex
        self._environment = clean_environment({"TANDEM_VENVS": str(venvs), MARK: self._mark})
        # Where it is set, importing the libraries takes three times as long, each time.
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        there = [name for name in BACKENDS if (venvs / f"server-{name}" / "bin" / "python").exists()]
        self._backend = (there or BACKENDS)[0]
        words = [
            "--config",
            str(config),
            "--backend",
            self._backend,
            "--run",
            "smoke",
            "--set",
            f"output_dir={folder / 'run'}",
        ]
        self._command = [str(venvs / "trainer" / "bin" / "tandem-train"), *words]
        self._training: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Go through all steps. Raises Failed."""
        steps = (
            ("both halves import what they need", self._imports),
            ("both halves accept the configuration", self._check),
            ("the server starts, and its engine answers", lambda: self._reach("connection.json", "evaluations.jsonl")),
            ("the base model completes prompts", lambda: self._reach("evaluations.jsonl")),
            ("a step trains", lambda: self._reach("metrics.jsonl")),
            ("the new adapter is served", self._adapter_is_served),
            ("everything ends, and nobody is left", self._ends),
        )
        for number, (what, reach) in enumerate(steps, start=1):
            print(f"{number}. {what}: ", end="", flush=True)
            began = time.monotonic()
            reach()
            print(f"ok, {time.monotonic() - began:.1f} s", flush=True)

    def end(self) -> None:
        """End what a failed step has left, by its mark."""
        if self._training and self._training.poll() is None:
            self._training.terminate()
            try:
                self._training.wait(60)
            except subprocess.TimeoutExpired:
                self._training.kill()

    def _imports(self) -> None:
        for name in ("trainer", f"server-{self._backend}"):
            modules = ", ".join(catalogue.ENVIRONMENTS[name].imports)
            self._quick([str(self._venvs / name / "bin" / "python"), "-c", f"import {modules}"], IMPORT_S)

    def _check(self) -> None:
        self._quick([*self._command, "--check"], CHECK_S)
        with (self._folder / "output").open("wb") as output, (self._folder / "errors").open("wb") as errors:
            self._training = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
            )

    def _quick(self, command: list[str], limit_s: float) -> None:
        try:
            done = subprocess.run(
                command,
                env=self._environment,
                cwd=self._folder,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Failed(str(error)) from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise Failed(lines[-1].strip() if lines else f"exit status {done.returncode}")

    def _reach(self, *names: str) -> None:
        """Wait until one of these files of the run has something in it."""
        paths = [self._run_dir / name for name in names]
        self._until(lambda: any(path.is_file() and path.stat().st_size for path in paths))

    def _adapter_is_served(self) -> None:
        """The completions after training name the version that made them."""
        samples = self._run_dir / "samples.jsonl"
        self._until(lambda: any(sample["phase"] == "eval_after" for sample in _lines(samples)))
        if any(sample["version"] == 0 for sample in _lines(samples) if sample["phase"] == "eval_after"):
            raise Failed("after training the base model still answers")

    def _ends(self) -> None:
        assert self._training
        self._until(lambda: self._training and self._training.poll() is not None)
        if self._training.returncode:
            raise Failed(self._last_words())
        if left := _living(self._mark):
            raise Failed(f"processes {', '.join(map(str, left))} live on")
        if (self._run_dir / "connection.json").exists():
            raise Failed("the server's address is still published")

    def _until(self, reached: Callable[[], object]) -> None:
        assert self._training
        deadline = time.monotonic() + STEP_S
        while not reached():
            if self._training.poll() is not None and not reached():
                raise Failed(self._last_words())
            if time.monotonic() > deadline:
                raise Failed(f"not within {STEP_S:g} s")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        """The first line of what tandem-train says went wrong, else the last line of a log."""
        for line in (self._folder / "errors").read_text(errors="replace").splitlines():
            if line.startswith("tandem-train: "):
                return line.removeprefix("tandem-train: ")
        last = [line for name in LOGS for line in tail(self._folder / name, 1)]
        return last[0] if last else f"exit status {self._training.returncode if self._training else None}"


def _lines(path: Path) -> list[dict[str, object]]:
    """The whole lines of a JSONL file."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _living(mark: str) -> list[int]:
    """Processes that were started with a mark in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                words = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in words:
                found.append(int(folder.name))
    return found
