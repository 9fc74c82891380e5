"""The server half's own figures, as Prometheus reads them: counted where things happen, or read when somebody asks."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bridge import protocol as p
from bridge.errors import BridgeError

KINDS: Mapping[type[p.Message], str] = {
    p.Generate: "generate",
    p.Score: "score",
    p.PublishAdapter: "publish",
    p.Canary: "canary",
    p.Sleep: "sleep",
    p.Wake: "wake",
}
"""Requests that are counted: work for the engine. Heartbeats and questions about the server itself are not."""

Proof = Literal["agrees", "disagrees"]
PROOFS: tuple[Proof, ...] = ("agrees", "disagrees")

_REQUEST_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
_ADAPTER_BUCKETS_S = (0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 3, 10, 30, 120)
_SLEEP_BUCKETS_S = (0.1, 0.3, 0.5, 1, 2, 3, 5, 10, 30, 60)

# When each series began to be counted doubles their number, and Prometheus finds out by itself.
prometheus_client.disable_created_metrics()


class EngineFigures(NamedTuple):
    """One engine now."""

    ready: bool
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the server half is like now. waiting: requests that are held, by what for."""

    status: p.ServerStatus
    run: str
    in_flight: int
    waiting: Mapping[str, int]
    prompt_tokens: int
    asleep: bool
    engines: Sequence[EngineFigures]


class Metrics:
    """All figures of one server. read: asked at each scrape for those that are the state of something."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_State(read))
        self._requests = self._counter("tandem_requests", "Requests that have ended.", "kind", "outcome")
        self._seconds = self._histogram(
            "tandem_request_seconds", "From a request's arrival to its answer.", _REQUEST_BUCKETS_S, "kind"
        )
        self._published = self._counter("tandem_adapter_published_bytes", "Bytes of the adapters that were published.")
        self._spool = self._histogram(
            "tandem_adapter_spool_seconds", "Checking an adapter and writing its files.", _ADAPTER_BUCKETS_S
        )
        self._load = self._histogram(
            "tandem_adapter_load_seconds", "Loading an adapter into the running engine.", _ADAPTER_BUCKETS_S
        )
        self._proofs = self._counter(
            "tandem_proofs", "Engines asked whether they still compute what they did.", "outcome"
        )
        self._proof = self._histogram("tandem_proof_seconds", "One such proof.", _REQUEST_BUCKETS_S)
        self._sleep = self._histogram(
            "tandem_engine_sleep_seconds", "Finishing what was in flight and giving memory back.", _SLEEP_BUCKETS_S
        )
        self._wake = self._histogram("tandem_engine_wake_seconds", "Taking memory back.", _SLEEP_BUCKETS_S)
        for kind in KINDS.values():  # A series that begins with its first event is blind to that one.
            self._requests.labels(kind, "ok")
            self._seconds.labels(kind)
        for outcome in PROOFS:
            self._proofs.labels(outcome)

    @contextlib.contextmanager
    def request(self, kind: type[p.Message]) -> Iterator[None]:
        """Around the work on one message: counts how it ends, and takes the time of those that are answered."""
        started, outcome = time.monotonic(), "error"
        try:
            yield
            outcome = "ok"
        except BridgeError as error:
            outcome = error.code
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            if name := KINDS.get(kind):
                self._requests.labels(name, outcome).inc()
                if outcome == "ok":
                    self._seconds.labels(name).observe(time.monotonic() - started)

    def published(self, loaded: p.AdapterLoaded) -> None:
        """A new version serves."""
        self._published.inc(loaded.nbytes)
        if loaded.alias_of < 0:
            self._spool.observe(loaded.spool_s)
            self._load.observe(loaded.load_s)

    def proved(self, outcome: Proof, seconds: float) -> None:
        """An engine was asked whether it computes what it did."""
        self._proofs.labels(outcome).inc()
        self._proof.observe(seconds)

    def turned(self, *, asleep: bool, seconds: float) -> None:
        """The engine has fallen asleep, or is awake again."""
        (self._sleep if asleep else self._wake).observe(seconds)

    def text(self) -> str:
        """All of it in Prometheus's text format."""
        return prometheus_client.generate_latest(self._registry).decode()

    def _counter(self, name: str, what: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float], *labels: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(name, what, labels, buckets=buckets, registry=self._registry)


class _State(Collector):
    """Figures that somebody keeps anyway, read at each scrape."""

    def __init__(self, read: Callable[[], Figures]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: asking for the names must not read a server that has not started."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of them as they are now."""
        now = self._read()
        status = now.status
        yield _info(status, now.run)
        yield GaugeMetricFamily("tandem_uptime_seconds", "Since the server was started.", status.uptime_s)
        yield GaugeMetricFamily("tandem_requests_in_flight", "Requests that the engine works on.", now.in_flight)
        yield _labelled(
            GaugeMetricFamily("tandem_requests_waiting", "Requests that are held, by what for.", labels=["reason"]),
            now.waiting,
        )
        yield CounterMetricFamily("tandem_prompt_tokens", "Tokens read: prompts and scored ones.", now.prompt_tokens)
        yield CounterMetricFamily("tandem_generated_tokens", "Tokens sampled.", status.generated_tokens)
        yield GaugeMetricFamily("tandem_adapter_version", "The newest version; 0: the base model.", status.version)
        yield GaugeMetricFamily(
            "tandem_adapter_versions_loaded", "Versions that requests may name.", len(status.loaded)
        )
        yield _labelled(
            GaugeMetricFamily("tandem_engine_ready", "Whether the engine answers.", labels=["engine"]),
            {str(index): engine.ready for index, engine in enumerate(now.engines)},
        )
        yield _labelled(
            CounterMetricFamily("tandem_engine_restarts", "Times the engine was started again.", labels=["engine"]),
            {str(index): engine.restarts for index, engine in enumerate(now.engines)},
        )
        yield GaugeMetricFamily("tandem_engine_asleep", "Whether GPU memory is given back.", now.asleep)
        yield CounterMetricFamily(
            "tandem_dropped_frames", "Messages that were none, or not for this server.", status.dropped_frames
        )


def _info(status: p.ServerStatus, run: str) -> Metric:
    labels = {"backend": status.engine, "engine_version": status.engine_version, "run": run}
    family = GaugeMetricFamily("tandem_server_info", "Always 1; what it is, is in the labels.", labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    """The family with one sample for each value of its one label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family
