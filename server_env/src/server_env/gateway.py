"""tandem-server as a whole: everything is made, started in order, and taken down so that nothing stays behind."""

import asyncio
import contextlib
import logging
import os
import resource
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path

from bridge.endpoint import Connection, for_people, ipc_address, private_dir, write_connection
from bridge.errors import ConfigError
from bridge.protocol import MAX_CONTROL_BYTES, MAX_DATA_BYTES, Stats
from bridge.security import ServerKeys, new_keys
from bridge.server import BridgeLimits, BridgeServer
from server_env.adapters.canary import CanaryCheck
from server_env.adapters.peft_adapter import BaseModel
from server_env.adapters.spool import Spool
from server_env.adapters.versions import AdapterLimits, Adapters
from server_env.config import ServerFile
from server_env.engines.backends import NOWHERE, device_of, make_engine
from server_env.engines.engine import Engine
from server_env.gpus import shares
from server_env.gpus.sleeping import Sleeper
from server_env.lease import Starter
from server_env.metrics.http_front import HttpFront
from server_env.metrics.metrics_page import MetricsPage
from server_env.metrics.openai_api import OpenAIApi
from server_env.ownership import own
from server_env.service import Service
from server_env.supervision.cache import EngineCache
from server_env.supervision.engine_process import EngineProcess
from server_env.supervision.replicas import Replicas
from server_env.supervision.scratch import Scratch

log = logging.getLogger(__name__)

STATS_S = 5.0


async def serve(file: ServerFile, run_dir: Path, trainer: int | None = None) -> str:
    """Run a server until it is told to end; why it ended. trainer: the pid of the one that started it.

    Raises ConfigError and EngineFailed when it cannot start.
    """
    async with contextlib.AsyncExitStack() as stack:
        gateway = Gateway(file, private_dir(run_dir.absolute()), stack, Starter.of(trainer))
        return await gateway.run()


class Gateway:
    """One server. What is made here is undone by the exit stack, in the opposite order."""

    def __init__(
        self, file: ServerFile, run_dir: Path, stack: contextlib.AsyncExitStack, starter: Starter | None
    ) -> None:
        self._file = file
        self._run_dir = run_dir
        self._stack = stack
        own(run_dir, stack)
        self._uuid = uuid.uuid4().hex
        self._hurry: asyncio.Task[None] | None = None
        _allow_many_connections()
        self._service = Service(file, server_uuid=self._uuid, log_path=str(run_dir / "server.log"), starter=starter)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):  # Before anything is made that a signal could leave behind.
            loop.add_signal_handler(signum, self._on_signal, signal.Signals(signum).name)
        engines = [make_engine(file) for _ in range(file.server.data_parallel)]
        gpus = shares(file.server, device_of(file), engines[0].gpus, os.environ)
        scratch = Scratch(self._uuid)
        stack.callback(scratch.remove)
        spool = Spool(scratch.spool(file.server.spool_dir, run_dir))
        stack.callback(spool.remove)
        self._scratch = scratch.path
        processes = [self._process(number, engine, gpus[number]) for number, engine in enumerate(engines)]
        self._replicas = Replicas(processes, self._service, file.server)
        limits = AdapterLimits(
            max_rank=engines[0].max_lora_rank, kept=file.server.max_staleness + 1, held=engines[0].adapters_held
        )
        self._adapters = Adapters(self._replicas, spool, BaseModel.read(engines[0].model), limits)
        self._service.replicas = self._replicas
        self._service.adapters = self._adapters
        self._service.canary = CanaryCheck(self._adapters, file.server.load_timeout_s, self._service.metrics.proved)
        self._replicas.prove = self._service.canary.require_the_same
        self._service.sleeper = Sleeper(self._replicas)
        self._replicas.turns = lambda: not self._service.dozing

    def _process(self, number: int, engine: Engine, gpus: Mapping[str, str]) -> EngineProcess:
        """One engine, with a log, a folder and a compile cache of its own."""
        cache = EngineCache.acquire(engine.name, engine.installed_version, engine.command(NOWHERE))
        self._stack.callback(cache.release)
        return EngineProcess(
            engine,
            device=device_of(self._file),
            scratch=private_dir(self._scratch / str(number)),
            cache=cache.path,
            log_path=self._run_dir / (f"engine-{number}.log" if number else "engine.log"),
            environment={**os.environ, **gpus},
        )

    def _on_signal(self, name: str) -> None:
        """The first signal ends the server; another one means now."""
        if self._service.ended.is_set() and self._hurry is None:
            self._hurry = asyncio.create_task(self._replicas.hurry())
        self._service.end(name)

    async def run(self) -> str:
        """Start, serve, end."""
        self._stack.push_async_callback(self._adapters.close)
        self._stack.push_async_callback(self._replicas.stop)
        if await self._started():
            await self._serve()
        log.info("ending: %s", self._service.why_ended)
        return self._service.why_ended

    async def _started(self) -> bool:
        """Start the engines; False when the server is told to end meanwhile."""
        start = asyncio.create_task(self._replicas.start())
        ended = asyncio.create_task(self._service.ended.wait())
        await asyncio.wait({start, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if start.done():
            start.result()
            return True
        start.cancel()
        await asyncio.wait({start})
        return False

    async def _serve(self) -> None:
        data, control, keys, client = self._addresses()
        self._service.max_adapter_bytes = self._largest_adapter()
        bridge = BridgeServer(
            self._service.handle,
            data=data,
            control=control,
            keys=keys,
            limits=BridgeLimits(
                max_in_flight=self._file.server.max_in_flight, max_control_bytes=self._service.max_adapter_bytes
            ),
            work_timeout=self._replicas.serving_time.timeout,
        )
        await bridge.start()
        # The engines go first: what is in flight is then answered with the reason, while the bridge still can.
        self._stack.push_async_callback(bridge.stop)
        self._stack.push_async_callback(self._replicas.stop)
        self._service.push = bridge.push
        self._service.dropped_frames = lambda: bridge.dropped_frames
        await self._open_to_people()
        connection = Connection(
            data=bridge.data,
            control=bridge.control,
            server_uuid=self._uuid,
            pid=os.getpid(),
            server_key=keys.own.public if keys else "",
            client_public=client[0],
            client_secret=client[1],
            http_url=self._service.http_url,
            metrics_url=self._service.metrics_url,
            log_path=str(self._run_dir / "server.log"),
        )
        path = self._run_dir / "connection.json"
        write_connection(path, connection)
        self._stack.callback(path.unlink, missing_ok=True)
        print(f"tandem-server is ready: {path}", flush=True)
        for line in for_people(connection.http_url, connection.metrics_url):
            print(line, flush=True)
        log.info("ready; data %s, control %s", bridge.data, bridge.control)
        watchers = [asyncio.create_task(self._service.watch_lease()), asyncio.create_task(self._tell_stats(bridge))]
        ended = asyncio.create_task(self._service.ended.wait())
        done, _ = await asyncio.wait({ended, *watchers}, return_when=asyncio.FIRST_COMPLETED)
        for task in (*watchers, ended):
            task.cancel()
        for task in done:
            task.result()

    async def _open_to_people(self) -> None:
        """The OpenAI API and /metrics, where the configuration wants them."""
        server = self._file.server
        page = MetricsPage(self._service.metrics.text, self._replicas.engines)
        if server.http:
            api = OpenAIApi(self._replicas, self._adapters, self._service.sleeper)
            front = HttpFront("server.http", page, api)
            self._stack.push_async_callback(front.stop)
            self._service.http_url = await front.start(server.http)
        if server.metrics_address:
            front = HttpFront("server.metrics_address", page)
            self._stack.push_async_callback(front.stop)
            private = server.metrics_address == "ipc"
            self._service.metrics_url = await front.start(
                self._scratch / "metrics.sock" if private else server.metrics_address
            )

    def _addresses(self) -> tuple[str, str, ServerKeys | None, tuple[str, str]]:
        """Data and control address, the keys of a tcp server, and the key pair of its client."""
        if self._file.server.listen == "ipc":
            return ipc_address(self._scratch / "data"), ipc_address(self._scratch / "control"), None, ("", "")
        client = new_keys()
        keys = ServerKeys(new_keys(), frozenset({client.public}))
        host, _, port = self._file.server.listen.rpartition(":")
        if not port.isdecimal():
            raise ConfigError(f"server.listen: expected tcp://host:port, got {self._file.server.listen!r}.")
        control = f"{host}:{int(port) + 1 if int(port) else 0}"
        return self._file.server.listen, control, keys, client

    def _largest_adapter(self) -> int:
        """Bytes that a frame on control may have. Over tcp strangers can fill one before they are refused, so there it
        is what the model needs, once the engine has fetched it, and a header of no more than the data socket takes.
        """
        model = BaseModel.read(self._replicas.engine.model)
        tensors = 0 if self._file.server.listen == "ipc" else model.adapter_bytes(self._adapters.limits.max_rank)
        return min(tensors + MAX_DATA_BYTES, MAX_CONTROL_BYTES) if tensors else MAX_CONTROL_BYTES

    async def _tell_stats(self, bridge: BridgeServer) -> None:
        while True:
            await asyncio.sleep(STATS_S)
            bridge.push(Stats(pulse=self._service.pulse()))


def _allow_many_connections() -> None:
    """A connection a request needs more open files than the usual soft limit of 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
