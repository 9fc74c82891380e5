"""Bridge messages onto an engine: who may ask, under which adapter version, and what the answer is."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from bridge import protocol as p
from bridge.errors import BridgeError, EngineFailed, ProtocolMismatch, Refused
from bridge.server import Call
from server_env.adapters.canary import CanaryCheck
from server_env.adapters.versions import Adapters
from server_env.config import ServerFile
from server_env.gpus.sleeping import Sleeper
from server_env.lease import LeaseBook, Starter
from server_env.metrics import EngineFigures, Figures, Metrics
from server_env.supervision.replicas import Replicas

log = logging.getLogger(__name__)

CHANGING = (p.PublishAdapter, p.Canary, p.Sleep, p.Wake, p.Shutdown)
"""What changes the server for whoever else asks it."""

ENGINES_WORK = (p.Generate, p.Score, p.Canary)
"""What an engine is asked, and a sleep waits for."""

TICKS = 10
"""How often in a lease the time is counted; less often than MAX_TICK_S it never is."""

MAX_TICK_S = 0.5


class Service:
    """Answers every message of the protocol. `handle` is the bridge's handler, and it observes the engines."""

    http_url = ""
    metrics_url = ""
    max_adapter_bytes = p.MAX_CONTROL_BYTES
    adapters: Adapters
    canary: CanaryCheck
    sleeper: Sleeper
    replicas: Replicas

    def __init__(self, file: ServerFile, *, server_uuid: str, log_path: str, starter: Starter | None = None) -> None:
        self.ended = asyncio.Event()
        """Set when the server should end."""
        self.why_ended = ""
        self.push: Callable[[p.Event], None] = lambda _event: None
        self.dropped_frames: Callable[[], int] = lambda: 0
        self._served_s = 0.0
        """For how long this has served. Counted, not measured: while the server itself is suspended or starved, the
        heartbeats wait, and nobody is silent.
        """
        self.book = LeaseBook(file.server.lease_s, file.server.run_id, clock=lambda: self._served_s)
        self._file = file
        self._uuid = server_uuid
        self._log_path = log_path
        self._starter = starter
        self._started = time.monotonic()
        self.metrics = Metrics(self._figures)
        self._requests = 0
        self._prompt_tokens = 0
        self._tokens = 0
        self._dozing = False
        self._asked: dict[asyncio.Task[object], int] = {}
        """Who works on what an engine is asked, and of which epoch that is."""

    async def handle(self, request: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        """The reply to one message. Raises BridgeError to refuse it."""
        with self.metrics.request(type(request)), self._known(request):
            return await self._answer(request, call)

    async def _answer(self, request: p.DataRequest | p.ControlRequest, call: Call) -> p.Reply:
        self.book.admit(request.epoch, changing=isinstance(request, CHANGING))
        match request:
            case p.Generate():
                return await self._generate(request)
            case p.Score():
                return await self._score(request)
            case p.Hello() | p.Lease() | p.Ping() | p.Status() | p.Shutdown():
                return await self._about_the_server(request)
            case p.PublishAdapter():
                return await self._publish(request, call.buffer)
            case p.Canary():
                return await self.canary.answer(request, call.buffer, self.sleeper)
            case p.Sleep() | p.Wake():
                to_sleep = isinstance(request, p.Sleep)
                self._dozing = self._dozing and not to_sleep  # Whoever asks for sleep says when it ends, too.
                return await self._turn(self.sleeper.sleep if to_sleep else self.sleeper.wake)
        raise ProtocolMismatch(f"This server does not know what to do with {type(request).__name__}.")

    @contextlib.contextmanager
    def _known(self, request: p.DataRequest | p.ControlRequest) -> Iterator[None]:
        task = asyncio.current_task()
        if task and isinstance(request, ENGINES_WORK):
            self._asked[task] = request.epoch
        try:
            yield
        finally:
            if task:
                self._asked.pop(task, None)

    def _cancel_work(self, *, before: int) -> None:
        """What trainers of earlier epochs have asked: nobody waits for it but a sleep. An onlooker's (epoch 0) goes on.

        Each is cancelled once: it may have an engine to tell.
        """
        for task in [task for task, epoch in self._asked.items() if 0 < epoch < before]:
            del self._asked[task]
            task.cancel()

    def end(self, why: str) -> None:
        """Begin to shut down."""
        self.why_ended = why
        self.ended.set()

    @property
    def dozing(self) -> bool:
        """Whether the engines sleep since no trainer is there, rather than in a trainer's turn."""
        return self._dozing

    def pulse(self) -> p.Pulse:
        """How it is."""
        return p.Pulse(
            version=self.adapters.newest,
            engine_steps=self.replicas.finished,
            in_flight=self.sleeper.in_flight,
            engine=self.replicas.state,
            engines=len(self.replicas.serving()),
            restarts=self.replicas.restarts,
        )

    def _figures(self) -> Figures:
        """For /metrics."""
        return Figures(
            status=self._status(),
            run=self.book.run_id,
            in_flight=self.sleeper.in_flight,
            waiting={
                "version": self.adapters.waiting,
                "engine": self.replicas.waiting,
                "wake": self.sleeper.waiting,
            },
            prompt_tokens=self._prompt_tokens,
            asleep=self.sleeper.asleep,
            engines=[EngineFigures(*now) for now in self.replicas.each()],
        )

    # ---- the engines' lives (see replicas.Observer) ------------------------------------------------------------------

    def engine_died(self, error: EngineFailed, *, for_good: bool) -> None:
        """Tell those who listen."""
        self.push(p.EngineDied(why=f"{error.what} {error.why}".strip(), log_tail=error.log_tail, for_good=for_good))

    def engine_restarted(self, seconds: float) -> None:
        """Tell those who listen."""
        version, restarts = self.adapters.newest, self.replicas.restarts
        self.push(p.EngineRestarted(version=version, restarts=restarts, seconds=seconds))

    # ---- work --------------------------------------------------------------------------------------------------------

    async def _generate(self, request: p.Generate) -> p.Generated:
        prompt = _ids(request.prompt)
        sampling = request.sampling
        if not prompt or request.n < 1 or sampling.max_tokens < 1:
            raise Refused("Generate needs a prompt, n >= 1 and max_tokens >= 1.")
        await self.sleeper.until_awake()
        async with self.adapters.lease(request.version, request.min_version) as version, self.sleeper.working():
            completions = await self.replicas.call(
                lambda engine: engine.generate(version.name, prompt, request.n, sampling),
                adapter=version.name,
                sequences=request.n,
            )
        self._requests += 1
        self._prompt_tokens += len(prompt)
        self._tokens += sum(len(completion.logprobs) for completion in completions) // 4
        return p.Generated(version=version.number, completions=completions)

    async def _score(self, request: p.Score) -> p.Scored:
        token_ids = _ids(request.token_ids)
        if len(token_ids) < 2:
            raise Refused("Score needs two tokens or more: the first one has no logprob.")
        await self.sleeper.until_awake()
        async with self.adapters.lease(request.version, 0) as version, self.sleeper.working():
            logprobs = await self.replicas.call(
                lambda engine: engine.score(version.name, token_ids), adapter=version.name
            )
        self._requests += 1
        self._prompt_tokens += len(token_ids)
        return p.Scored(version=version.number, logprobs=p.pack_logprobs(logprobs))

    async def _publish(self, request: p.PublishAdapter, data: memoryview | None) -> p.AdapterLoaded:
        await self.sleeper.ready_for_adapters()
        before = self.adapters.newest
        loaded = await self.adapters.publish(request, data)
        if loaded.version != before:  # Asked again, it is answered with what the first time took.
            self.metrics.published(loaded)
        self.push(loaded)
        return loaded

    async def _turn(self, turn: Callable[[], Awaitable[p.Slept]]) -> p.Slept:
        """Put the engine to sleep or wake it; nothing when it is so already."""
        before = self.sleeper.asleep
        slept = await turn()
        if self.sleeper.asleep != before:
            self.metrics.turned(asleep=not before, seconds=slept.seconds)
        return slept

    # ---- the server itself -------------------------------------------------------------------------------------------

    async def _about_the_server(self, request: p.Hello | p.Lease | p.Ping | p.Status | p.Shutdown) -> p.Reply:
        match request:
            case p.Hello():
                return await self._hello(request)
            case p.Lease():
                self.book.beat(request.epoch)
                if request.ends:
                    self.book.end()
                    return self.pulse()
                await self._stop_dozing()
                return self.pulse()
            case p.Ping():
                return self.pulse()
            case p.Status():
                return self._status()
            case p.Shutdown():
                self.end(request.reason or "asked by a client")
                return p.Done()

    async def _hello(self, hello: p.Hello) -> p.Welcome:
        if hello.protocol != p.PROTOCOL_VERSION:
            raise ProtocolMismatch(
                f"The client speaks protocol {hello.protocol}, this server {p.PROTOCOL_VERSION}.",
                remedy="Run scripts/setup_envs.sh, which installs both halves from this checkout.",
            )
        if hello.run_id:
            same_run = hello.run_id == self.book.run_id
            if self.book.attach(hello.run_id, hello.client, alone=hello.alone, again=hello.again):
                self._cancel_work(before=self.book.epoch)
                self.adapters.new_epoch(same_run=same_run)
                log.info("run %r (%s) holds the lease, epoch %d", hello.run_id, hello.client, self.book.epoch)
            await self._stop_dozing()
        facts, engine = self.replicas.facts, self.replicas.engine
        assert facts
        return p.Welcome(
            protocol=p.PROTOCOL_VERSION,
            server_uuid=self._uuid,
            engine=engine.name,
            engine_version=facts.version,
            model=engine.model,
            capabilities=tuple(sorted(facts.capabilities)),
            limits=p.Limits(
                max_context=facts.max_context,
                max_lora_rank=engine.max_lora_rank,
                adapter_slots=engine.adapter_slots,
                max_in_flight=self._file.server.max_in_flight,
                vocab_size=self.adapters.base.vocab_size,
                max_adapter_bytes=self.max_adapter_bytes,
            ),
            version=self.adapters.newest,
            epoch=self.book.epoch if hello.run_id else 0,
            lease_s=self.book.lease_s if hello.run_id else 0.0,
            restart_s=self.replicas.restart_s,
            log_path=self._log_path,
            http_url=self.http_url,
            metrics_url=self.metrics_url,
        )

    def _status(self) -> p.ServerStatus:
        facts, pids = self.replicas.facts, self.replicas.pids
        assert facts
        return p.ServerStatus(
            engine=self.replicas.engine.name,
            engine_version=facts.version,
            engine_pid=next(filter(None, pids), 0),
            engine_pids=pids,
            version=self.adapters.newest,
            loaded=self.adapters.loaded,
            in_use=self.adapters.in_use,
            restarts=self.replicas.restarts,
            requests=self._requests,
            generated_tokens=self._tokens,
            dropped_frames=self.dropped_frames(),
            uptime_s=time.monotonic() - self._started,
        )

    # ---- the lease ---------------------------------------------------------------------------------------------------

    async def watch_lease(self) -> None:
        """End the server when its trainer has been silent for too long, or when none ever came.

        The trainer that started it may load its own model for longer than the engine took: while it lives it will come.
        """
        keep = self._file.server.keep_server_s
        first = max(keep, self._file.server.attach_within_s)
        tick_s, waiting_from_s = min(MAX_TICK_S, self.book.lease_s / TICKS), self._served_s
        while not self.ended.is_set():
            await asyncio.sleep(tick_s)
            self._served_s += tick_s
            if self.book.epoch == 0:
                if self._starter and self._starter.lives:
                    waiting_from_s = self._served_s
                elif keep >= 0 and self._served_s - waiting_from_s > first:
                    self.end(f"no trainer came within {first:g} s, as server.attach_within_s and keep_server_s say")
            elif not self.book.alive:
                if self.book.died:  # Otherwise it may only stand still, and be back for its answers.
                    self._cancel_work(before=self.book.epoch + 1)
                if 0 <= keep <= self.book.silent_s - self.book.lease_s:
                    self.end(f"run {self.book.run_id!r} has been silent for {self.book.silent_s:.0f} s")
                elif self.sleeper.possible and not self.sleeper.asleep and not self.sleeper.in_flight:
                    await self._doze()  # With nothing to wait for: whoever comes wakes the engine only afterwards.

    async def _doze(self) -> None:
        """Nobody is there: give the GPU's memory back until somebody comes."""
        self._dozing = True
        try:
            await self._turn(self.sleeper.sleep)
        except BridgeError as error:
            log.warning("the engine does not sleep while no trainer is there: %s", error.what)
            self._dozing = False
        if self.book.alive:
            await self._stop_dozing()

    async def _stop_dozing(self) -> None:
        """Somebody is there. Whoever begins to wake it may be cancelled first: then the next one does."""
        if self._dozing:
            await self._turn(self.sleeper.wake)
            self._dozing = False


def _ids(packed: p.TokenIds) -> list[int]:
    try:
        return p.unpack_ids(packed)
    except ValueError:
        raise Refused(f"{len(packed)} bytes are no whole number of token ids.") from None
