"""A /metrics page as Prometheus reads it: parsed, its samples by name and labels."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bridge import protocol as p
from served import Served
from server_env.metrics import EngineFigures, Figures


class Page:
    """Asserts that it is valid: every family described once, no sample given twice."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: list[Sample] = [s for family in text_string_to_metric_families(text) for s in family.samples]
        described = Counter(re.findall(r"^# (TYPE|HELP) (\S+)", text, re.MULTILINE))
        assert not [name for name, times in described.items() if times > 1]
        series = Counter((sample.name, tuple(sorted(sample.labels.items()))) for sample in self.samples)
        assert not [name for name, times in series.items() if times > 1]
        assert not text or text.endswith("\n")

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of all samples of a name that have these labels; fails where there is none."""
        found = [s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name}{labels} is not on the page:\n{self.text}"
        return sum(found)


def session_of(metrics_url: str) -> aiohttp.ClientSession:
    path = metrics_url.removeprefix("unix:")
    if path == metrics_url:
        return aiohttp.ClientSession(metrics_url)
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path))


async def read(server: Served) -> Page:
    """The server's page now."""
    async with session_of(server.connection.metrics_url) as http, http.get("/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return Page(await answer.text())


async def read_until(server: Served, holds: Callable[[Page], bool], timeout_s: float = 90.0) -> Page:
    """The first page of which something holds, within a deadline."""
    deadline = time.monotonic() + timeout_s
    while not holds(page := await read(server)):
        assert time.monotonic() < deadline, page.text
        await asyncio.sleep(0.05)
    return page


def figures(engines: int = 2) -> Figures:
    """Of a server that is not there."""
    status = p.ServerStatus(
        engine="vllm",
        engine_version="0.1",
        engine_pid=1,
        version=5,
        loaded=(4, 5),
        in_use={},
        restarts=0,
        requests=0,
        generated_tokens=70,
        dropped_frames=6,
        uptime_s=1.5,
    )
    return Figures(
        status=status,
        run="adding",
        in_flight=2,
        waiting={"version": 1, "slot": 0},
        prompt_tokens=30,
        asleep=False,
        engines=[EngineFigures(ready=index == 0, restarts=index) for index in range(engines)],
    )
