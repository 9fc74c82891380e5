"""A run's server: checked, started or taken over, connected to, replaced when it dies, kept or ended."""

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bridge import protocol as p
from bridge.blocking import BlockingClient
from bridge.errors import BridgeError, ConfigError, PeerDied, Refused
from trainer_env.config import TrainConfig
from trainer_env.config.toml_writer import write_toml
from trainer_env.placement import Placement
from trainer_env.runs.jsonl import write_atomically
from trainer_env.serving.lasting_client import LastingClient
from trainer_env.serving.server_process import ServerProcess
from trainer_env.serving.server_settings import ready_within_s, server_settings, what_matters

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
LAST_BREATH_S = 10.0
"""For a server that no longer answers to end by itself."""
MAX_RESTARTS = 3
"""Servers started again without a new adapter version between them: past it the run ends."""


class Serving:
    """One run's server. say: tells people what is going on.

    `start`, then `connect`; what is asked through `client` outlives the server (see `LastingClient`).
    """

    def __init__(self, config: TrainConfig, placement: Placement, say: Callable[[str], None]) -> None:
        self._config = config
        self._placement = placement
        self._say = say
        self._process = self._process_in(config.run_dir)
        self._matters: dict[str, object] = {}
        self._anew = True
        self._learnt = False
        """Whether a server that this process has asked is to be replaced, for it serves adapters and the run begins."""
        self._client: LastingClient | None = None
        self._attached = False
        """Whether the server may have admitted this process: one that was interrupted does not know."""
        self._starting = threading.Lock()
        self._ending = False
        self._in_a_row = 0
        self._version = 0
        self._past_restarts = 0
        self._told_restarts = 0
        self._engine_restarts = 0

    @property
    def client(self) -> LastingClient:
        """Whom to ask, once connected."""
        assert self._client, "connect first"
        return self._client

    @property
    def connected(self) -> bool:
        """Whether there is somebody to ask."""
        return self._client is not None

    def versions(self) -> str:
        """Of the engine and torch, for people."""
        return self._process.versions()

    def check(self, source: str) -> str:
        """Have the server half check its part; the engine's command line. Starts nothing. Raises ConfigError."""
        with tempfile.TemporaryDirectory() as folder:
            process = self._process_in(Path(folder))
            path = self._write_settings(Path(folder), self._config.model.name)
            try:
                return process.check()
            except ConfigError as error:
                what = error.what.replace(f"{path}: ", "")
                error.what = f"{source}: {what}"  # The file that the reader knows.
                raise

    def start(self, model: str, *, anew: bool) -> None:
        """Go on with the server that this run's last trainer has left, if it will do; else end it and start one.

        model: what `models.resolve` returned. anew: the run begins, so a server must not serve adapters yet. Returns at
        once: the engine loads while the trainer does. Raises Refused while another trainer holds the server.
        """
        self._anew = anew
        run_dir = self._config.run_dir
        self._matters = what_matters(server_settings(self._config, model, self._placement), self._config)
        if self._process.take_over(self._matters):
            self._say("going on with the server that the last trainer of this run has left")
            if self._process.published:  # The lease is running out: it is taken before anything is loaded here.
                self._hold(self._attach_to_left())
            return
        if self._process.left_behind:
            other = f": other settings ({', '.join(self._process.differences)})" if self._process.differences else ""
            self._say(f"ending the server that the last trainer of this run has left{other}")
            self._process.end_last(self._config.run)
        self._write_settings(run_dir, model)
        self._say(f"starting the {self._config.backend} server; log: {run_dir / 'server.log'}")
        self._process.start(self._matters)

    def connect(self) -> LastingClient:
        """Wait until the engine has answered, and take the server's lease. Raises what keeps it from being ready."""
        if self._client is None and (self._process.taken_over or self._learnt):
            self._hold(self._attach_to_left())
        if self._client is None:
            self._hold(self._attach(again=self._attached))
        return self.client

    def begin(self, version: int) -> None:
        """The run begins: from now on `connect` gives a server that serves no adapter yet, another one if need be.

        version: what the server serves, as far as it was asked.
        """
        self._anew = True
        if self._client and version:
            self._learnt = True
            client, self._client = self._client, None
            client.close()

    def begin_anew(self) -> LastingClient:
        """Hold the server under another epoch, in which the first version may be older than its newest.

        Raises what keeps the server from answering. Failed or interrupted, `connect` goes on from there.
        """
        old = self.client
        try:
            self._hold(self._attach(again=True))
        finally:
            if self._client is old and self._process.alive:  # Perhaps it admitted us, and refuses the old client.
                self._client = None
            if self._client is not old:
                old.close()
        return self.client

    def restarts(self) -> int:
        """How often an engine or a tandem-server was started again since this was last asked; first: in the run's time
        with them.
        """
        known = self._past_restarts + self.client.ask(p.Status()).restarts
        new, self._told_restarts = known - self._told_restarts, known
        return new

    def died(self) -> BridgeError | None:
        """Why the server ended; None while it lives."""
        return None if self._process.alive else self._process.died()

    def require_keepable(self) -> None:
        """Raises ConfigError when its settings say that the server ends with its trainer."""
        if not self._config.server.get("keep_server_s", 0):
            raise ConfigError(
                "The server cannot be kept: server.keep_server_s is 0, so it ends when its trainer goes.",
                remedy="Set server.keep_server_s to the seconds that it waits for the next trainer, 900 for instance.",
            )

    def keep(self) -> None:
        """Let go of the server and leave it running, for `server.keep_server_s`. Raises ConfigError.

        One that is gone is not started again for that, and one that is not ready yet is not kept.
        """
        self.require_keepable()
        with self._starting:
            self._ending = True
        if self._client is None and not self._process.published:
            self._say("the server was not ready yet: it is ended")
            return
        with contextlib.suppress(BridgeError):
            self.connect()  # Its time begins with the end of a lease.
        client = self._client
        if client:
            client.give_up()
            with contextlib.suppress(BridgeError):  # It may be gone: whoever comes next will find out.
                client.last_words(p.Lease(ends=True, deadline_s=5))
        self._process.let_go()
        self._client = None
        if client:
            client.close()

    def close(self, *, now: bool = False) -> None:
        """End the server and its engine, whatever state they are in. now: kill rather than ask.

        Interrupted, it may be called again.
        """
        with self._starting:
            self._ending = True
        try:
            if self._client:
                self._client.give_up()
                if not now:
                    self._ask_to_end(self._client)
        finally:
            try:
                self._process.stop(now=now)  # Before the client: it may be waiting for a server that starts.
            finally:
                client, self._client = self._client, None
                if client:
                    client.close()

    def _ask_to_end(self, client: LastingClient) -> None:
        try:
            client.last_words(p.Shutdown(reason="the run has ended", deadline_s=5))
        except BridgeError:
            return  # It may be gone, or hang: the ladder that follows does not need its answer.
        self._process.wait_ended(30)

    def _attach(self, *, again: bool = False) -> BlockingClient:
        """A client that holds the lease, once the server is ready. again: this process holds it already."""
        connection = self._process.wait_ready(ready_within_s(self._config))
        self._attached = True
        return BlockingClient.connect(
            connection,
            run_id=self._config.run,
            alone=True,
            again=again,
            timeout_s=CONNECT_TIMEOUT_S,
            on_event=self._on_event,
        )

    def _hold(self, client: BlockingClient | None) -> None:
        self._client = LastingClient(client, self._renew) if client else None

    def _attach_to_left(self) -> BlockingClient | None:
        """A client of the server that was left; None when that was ending or will not do, and another one starts."""
        try:
            client = self._attach(again=self._attached)
            before = client.ask(p.Status()).restarts
        except Refused:  # It is somebody else's, and not ours to end.
            self._process.let_go()
            raise
        except BridgeError as error:
            log.warning("the server that was left does not answer: %s", error)
        else:
            if not (self._anew and client.welcome.version):
                self._engine_restarts, self._past_restarts = before, -before  # Those are of the last trainer's time.
                return client
            client.close()
        self._say("the server that was left will not do: another one is started")
        self._process.stop()
        self._start_again()
        self._learnt, self._engine_restarts = False, 0
        return None

    def _renew(self, error: PeerDied, version: int) -> BlockingClient:
        """Another server for one that is gone, with a client of it. Called on a thread of its own.

        Raises why the last one ended when it said so itself, or when too many have.
        """
        if version != self._version:
            self._version, self._in_a_row = version, 0
        began = time.monotonic()
        while True:
            self._process.wait_ended(LAST_BREATH_S)
            died = self._process.died() if not self._process.alive else error
            if self._in_a_row == MAX_RESTARTS:
                died.why = died.why or f"It was started again {MAX_RESTARTS} times without a step between them."
                raise died
            if failure := self._process.failure():
                raise failure
            self._in_a_row += 1
            self._past_restarts += 1 + self._engine_restarts
            self._engine_restarts = 0
            log.warning("tandem-server is gone, and another one is started: %s", died)
            self._say("tandem-server is gone: another one is started, and what is open is asked again")
            self._process.stop(now=True)
            self._start_again()
            try:
                client = self._attach()
            except BridgeError:
                if self._process.alive:
                    raise
                continue
            log.warning("there is a tandem-server again after %.0f s", time.monotonic() - began)
            return client

    def _start_again(self) -> None:
        with self._starting:
            if self._ending:
                raise PeerDied("The run is ending.")
            self._process.start(self._matters)

    def _on_event(self, event: p.Event) -> None:
        """Called on a client's thread, where the answer to a publish waits behind it."""
        if not isinstance(event, p.AdapterLoaded):
            self._process.note_family()
        match event:
            case p.EngineDied():
                then = "has left for good" if event.for_good else "died, and is started again"
                log.warning("an engine %s: %s\n%s", then, event.why, event.log_tail)
            case p.EngineRestarted():
                self._engine_restarts = event.restarts
                log.warning("an engine is back after %.0f s, with version %d", event.seconds, event.version)

    def _process_in(self, run_dir: Path) -> ServerProcess:
        planned = self._placement
        return ServerProcess(self._config.backend, run_dir, planned.server_environment(), planned.free_bytes())

    def _write_settings(self, folder: Path, model: str) -> Path:
        path = folder / "server.toml"
        write_atomically(path, write_toml(server_settings(self._config, model, self._placement)).encode())
        return path
