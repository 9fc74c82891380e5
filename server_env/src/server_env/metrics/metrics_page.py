"""One `/metrics` page: the engines' native figures and the server half's own, valid even while an engine is down."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

import aiohttp
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from server_env.engines.engine import Engine, EngineGone

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ENGINE_TIMEOUT_S = 5.0
"""Half of what Prometheus grants a whole page, so that an engine that hangs leaves our own figures readable."""

LABEL = "engine"
THEIR_LABEL = "exported_engine"
"""What an engine's own label of that name becomes; Prometheus itself calls it so when it has to give way."""


class MetricsPage:
    """own: the server half's text. engines: by what tells their figures apart, when there is more than one."""

    def __init__(self, own: Callable[[], str], engines: Mapping[str, Engine]) -> None:
        self._own = own
        self._engines = engines

    async def text(self) -> str:
        """The page. An engine that does not answer is left out: our own figures say what state it is in."""
        natives = await asyncio.gather(*map(_native, self._engines.values()))
        if len(natives) == 1:
            return _whole_lines(natives[0]) + self._own()
        merged = await asyncio.to_thread(merge, list(zip(self._engines, natives, strict=True)))
        return merged + self._own()


async def _native(engine: Engine) -> str:
    """What an engine says of itself; nothing when it is down, too slow, or keeps no figures."""
    try:
        timeout = aiohttp.ClientTimeout(total=ENGINE_TIMEOUT_S)
        async with engine.http().get("/metrics", timeout=timeout) as answer:
            return await answer.text() if answer.status == 200 else ""
    except (EngineGone, aiohttp.ClientError, TimeoutError, ConnectionError):
        return ""


def merge(natives: Sequence[tuple[str, str]]) -> str:
    """Several engines' pages as one: each family once, each sample with its engine's label."""
    families: dict[str, Metric] = {}
    for label, text in natives:
        for found in text_string_to_metric_families(text):
            family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
            for sample in found.samples:
                theirs = {THEIR_LABEL if name == LABEL else name: value for name, value in sample.labels.items()}
                family.samples.append(sample._replace(labels={LABEL: label, **theirs}))
    return generate_latest(_Families(families)).decode()


class _Families(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()


def _whole_lines(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
