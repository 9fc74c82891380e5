"""Whole runs for tests: commands started as a user would start them, told from everybody else's by a mark of theirs.

A run's processes are those whose environment holds its mark, whoever their parent is by now; what descends from them;
and who was one of these when last looked at, for an engine's workers write their titles over their environment.
"""

import array
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bridge import guard

ROOT = Path(__file__).parent.parent
VENVS = ROOT / ".venvs"
TRAINER_PYTHON = VENVS / "trainer" / "bin" / "python"
TRAIN = (str(VENVS / "trainer" / "bin" / "tandem-train"),)
FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
MARK = "TANDEM_TEST_RUN"
POLL_S = 0.05
PATIENCE_S = 300.0
"""For anything that a run comes to by itself: what takes 20 s takes ten times as long on a busy machine."""
NOTE_S = 1.0
AT_A_TIME = 2
GUARD_S = 30.0
"""What a guard may take to end an engine whose server was killed."""

Scenario = Callable[["Lab"], Any]
SCENARIOS: dict[str, Scenario] = {}


def scenario(work: Scenario) -> Any:
    """A fixture with what `work(lab)` returns. What the selected tests need begins early, some at a time."""
    SCENARIOS[work.__name__] = work

    @pytest.fixture(scope="session", name=work.__name__)
    def result(lab):
        return lab.result(work.__name__)

    return result


def marked(mark: str) -> set[int]:
    """Processes with a mark. A zombie has no environment any more, nor has a program that wrote its title over it."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
    return found


def started(pid: int) -> str:
    """When a process began, by the kernel's clock: with its pid, this names it for good. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


class Run:
    """A command that was started in a working directory of its own, with all that it says and leaves."""

    def __init__(self, lab: "Lab", words: Sequence[str], *, output_dir: Path, variables: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = lab.folder / self.mark[:8]
        self.cwd = self.folder / "cwd"
        self.cwd.mkdir(parents=True)
        self.output_dir = output_dir
        self.journal_path = self.folder / "journal.jsonl"
        self.left: dict[int, str] | None = None
        """Who lived at the moment when the command had ended; None while it runs."""
        self.resumed: Run | None = None
        self._family: dict[int, str] = {}
        self._noted = 0.0
        self._gone = False
        self.expected_to_live = False
        """For a trainer that was killed: its server lives until the lease has run out."""
        environment = {**os.environ, "TANDEM_FAKE_JOURNAL": str(self.journal_path), **variables, MARK: self.mark}
        with (self.folder / "stdout").open("wb") as stdout, (self.folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                words,
                cwd=self.cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def cache(self) -> Path:
        """Of a run that was given one of its own."""
        return self.output_dir.parent / "cache"

    @property
    def run_dir(self) -> Path:
        """The run's folder: as it is while the command runs, and then as the command left it."""
        return self.output_dir / "run" if self.left is None else self.folder / "left"

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait for what the command comes to while it runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.code is not None and not condition()
            assert not ended, f"it ended with {self.code} before: {what}\n{self.report()}"
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self.report()}"
            self._pause()

    def says(self, text: str) -> None:
        self.until(lambda: text in self.stdout + self.stderr, f"it says {text!r}")

    def journals(self, event: str, count: int = 1) -> list[dict]:
        """Wait until the fake engine has written down so many events of a kind; these."""
        self.until(lambda: len(self.journal(event)) >= count, f"the engine journals {event!r}, {count} times")
        return self.journal(event)

    def journal(self, event: str = "") -> list[dict]:
        """Entries of one kind, or all."""
        return [entry for entry in self._lines(self.journal_path) if event in ("", entry["event"])]

    def interrupt(self, signum: int = signal.SIGINT) -> None:
        """SIGINT goes to the whole process group, as from a terminal; any other signal to the command alone."""
        if signum == signal.SIGINT:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)

    def living(self) -> dict[int, str]:
        """Command lines of the run's processes, by pid."""
        if self._gone:
            return {}
        ended = self.code is not None
        roots = marked(self.mark)
        pids = roots.union(*(guard.descendants(pid) for pid in roots))
        self._family |= {pid: started(pid) for pid in pids}
        self._noted = time.monotonic()
        found = {}
        for pid, start in self._family.items():
            if start and start == started(pid) and guard.living(pid):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        self._gone = ended and not found
        return found

    def finish(self, timeout_s: float = PATIENCE_S) -> "Run":
        """Wait for its end, and look at once who of it lives."""
        deadline = time.monotonic() + timeout_s
        while self.code is None:
            if time.monotonic() > deadline:
                pytest.fail(f"it has not ended within {timeout_s:g} s\n{self.report()}")
            self._pause()
        left = self.living()
        if self.run_dir.exists():
            shutil.copytree(self.run_dir, self.folder / "left")
        self.left = left
        return self

    def gone(self, timeout_s: float = PATIENCE_S) -> "Run":
        """Wait until nobody of it lives."""
        deadline = time.monotonic() + timeout_s
        while alive := self.living():
            assert time.monotonic() < deadline, f"{alive} still live after {timeout_s:g} s"
            time.sleep(POLL_S)
        return self

    def kill_all(self) -> None:
        """Kill the command and its server. Their guards end the engines, and only who outlives these is killed here."""
        deadline = time.monotonic() + GUARD_S
        while alive := self.living():
            late = time.monotonic() > deadline
            for pid, command in alive.items():
                if late or "bin/tandem-" in command or pid == self.process.pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()

    def _pause(self) -> None:
        """A moment between two looks; now and then, note who belongs to it."""
        time.sleep(POLL_S)
        if time.monotonic() > self._noted + NOTE_S:
            self.living()

    @property
    def metrics(self) -> list[dict]:
        return self._lines(self.run_dir / "metrics.jsonl")

    @property
    def samples(self) -> list[dict]:
        return self._lines(self.run_dir / "samples.jsonl")

    @property
    def evaluations(self) -> list[dict]:
        return self._lines(self.run_dir / "evaluations.jsonl")

    @property
    def summary(self) -> dict:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def steps(self) -> list[int]:
        return [step["step"] for step in self.metrics]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("checkpoint-*"))

    def report(self) -> str:
        """All that was said, for a test that failed."""
        parts = [self.folder / "stdout", self.folder / "stderr"]
        parts += [self.run_dir / name for name in ("server.log", "engine.log", "trainer.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in parts if path.exists())

    @staticmethod
    def _lines(path: Path) -> list[dict]:
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Lab:
    """Starts runs, remembers them, and ends what a failed test has left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Run] = []
        self._pool = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="scenario")
        self._results: dict[str, Future[Any]] = {}
        self._making = threading.Lock()

    def begin(self, name: str) -> Future[Any]:
        """Start a scenario, unless it has been: AT_A_TIME of them run, the others wait."""
        if name not in self._results:
            self._results[name] = self._pool.submit(SCENARIOS[name], self)
        return self._results[name]

    def result(self, name: str) -> Any:
        return self.begin(name).result()

    def start(self, *words: str, output_dir: Path | None = None, **variables: str) -> Run:
        """Any command. output_dir: where its runs lie."""
        run = Run(self, words, output_dir=output_dir or self.folder, variables=variables)
        self.runs.append(run)
        return run

    def fake(self, *overrides: str, fault: str = "", reward: str = "", cache: bool = False, **options: Any) -> Run:
        """tandem-train in front of the fake engine: three small steps, no evaluation, and `key=value` on top.

        reward: Python source with a function `reward`, in place of the built-in one. cache: an empty one of its own.
        """
        output_dir = options.pop("output_dir", None) or self.folder / f"job-{uuid.uuid4().hex[:8]}" / "runs"
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        config = output_dir.parent / "job.toml"
        config.write_text(JOB.format(model=self.tiny(), engine=json.dumps(FAKE), output_dir=output_dir))
        settings = list(overrides)
        if reward:
            (output_dir.parent / "my_reward.py").write_text(reward)
            settings.append(f"rewards.0.function={output_dir.parent / 'my_reward.py'}:reward")
            settings.append("rewards.0.args={}")
        return self.start(
            *(*TRAIN, "--config", str(config), "--run", "run", *_sets(settings)),
            output_dir=output_dir,
            TANDEM_FAKE_FAULT=fault,
            **({"TANDEM_CACHE": str(output_dir.parent / "cache")} if cache else {}),
            **options,
        )

    def resume(self, run: Run, *overrides: str, fault: str = "") -> Run:
        """The same run, gone on with."""
        words = (*TRAIN, "--resume", "run", *_sets([f"output_dir={run.output_dir}", *overrides]))
        return self.start(*words, output_dir=run.output_dir, TANDEM_FAKE_FAULT=fault)

    def tiny(self) -> Path:
        """A random model with a vocabulary as small as the fake engine's, made once."""
        model = self.folder / "tiny-model"
        with self._making:
            if not (model / "complete.json").exists():
                script = ROOT / "tests" / "engines" / "make_tiny_model.py"
                subprocess.run([TRAINER_PYTHON, script, model], check=True, capture_output=True, timeout=PATIENCE_S)
        return model

    def flat(self) -> Path:
        """The same model with an output layer so small that every token is as likely as any other: the fake engine's
        logprobs can then be those of the model.
        """
        model = self.folder / "flat-model"
        shutil.copytree(self.tiny(), model)
        path = model / "model.safetensors"
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        first, end = json.loads(data[8:start])["lm_head.weight"]["data_offsets"]
        weights = array.array("f", data[start + first : start + end])
        data[start + first : start + end] = array.array("f", (weight / 1000 for weight in weights)).tobytes()
        path.write_bytes(data)
        return model

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for run in self.runs:
            run.kill_all()
        self._pool.shutdown()


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _sets(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


JOB = """
output_dir = "{output_dir}"

[model]
name = "{model}"
dtype = "float32"
max_seq_length = 128
use_gradient_checkpointing = false

[lora]
r = 8

[data]
source = "builtin:arithmetic"
eval_size = 2
chat = false

[[rewards]]
function = "regex"
args = {{ pattern = "7" }}

[grpo]
num_generations = 2
per_device_train_batch_size = 4
max_steps = 3
learning_rate = 1e-3
max_completion_length = 4

# The fake engine computes nothing like the model.
[rollout]
on_sync_mismatch = "warn"

[evaluation]
before = false
after = false

[server]
engine_command = {engine}
lease_s = 120.0
"""
