"""The OpenAI API for people holds neither a trainer's sleep nor an adapter's place for long, whatever people do."""

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from served import until
from server_env.adapters.peft_adapter import BaseModel
from server_env.engines.gate import Gate
from server_env.gpus.sleeping import Sleeper
from server_env.metrics import openai_api
from server_env.metrics.http_front import HttpFront
from server_env.metrics.openai_api import OpenAIApi

ROUTE = "/v1/completions"
ASK = {"model": "model", "prompt": [1]}


class Engine:
    """It never ends an answer: of a stream it writes more and more, of any other nothing comes."""

    model = "model"

    def __init__(self) -> None:
        self.asked, self.let_in, self.gate = 0, [], Gate()
        self.session: aiohttp.ClientSession | None = None

    def people(self, body):
        self.let_in.append(json.loads(body))
        return self.gate.shared()

    def http(self) -> aiohttp.ClientSession:
        assert self.session
        return self.session

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        if not (await request.json()).get("stream"):
            await asyncio.Event().wait()
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"data: " + bytes(1 << 16) + b"\n\n")

    @contextlib.asynccontextmanager
    async def running(self, folder):
        app = web.Application()
        app.router.add_post(ROUTE, self.answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.UnixSite(runner, folder / "engine.sock").start()
        async with aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(folder / "engine.sock")),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as self.session:
            yield
        await runner.cleanup()


class Replicas:
    """One engine."""

    facts, level = SimpleNamespace(capabilities={"sleep"}), "awake"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def serving(self):
        return {0: self.engine}

    async def turn(self, level):
        self.level = level

    @contextlib.asynccontextmanager
    async def one(self, _adapter, _sequences):
        yield self.engine


class Adapters:
    """The base model alone. held: by how many requests."""

    base, held = BaseModel(vocab_size=100), 0

    def was_published(self, _name):
        return False

    @contextlib.asynccontextmanager
    async def lease(self, _version, _min_version):
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


@pytest.fixture
async def server(tmp_path):
    """url: where people ask. idle: that nothing is held for them."""
    engine = Engine()
    async with engine.running(tmp_path):
        replicas: Any = Replicas(engine)
        adapters: Any = Adapters()
        sleeper, page = Sleeper(replicas), SimpleNamespace()
        front = HttpFront("server.http", page, OpenAIApi(replicas, adapters, sleeper))  # type: ignore[arg-type]
        url = await front.start("127.0.0.1:0")
        yield SimpleNamespace(
            url=url, engine=engine, sleeper=sleeper, idle=lambda: not sleeper.in_flight and not adapters.held
        )
        await front.stop()


@contextlib.asynccontextmanager
async def asked(server, **changes):
    """Somebody's connection, over which an answer is asked for. What comes is not read unless the test does."""
    body = json.dumps(ASK | changes).encode()
    where = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1024)
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (ROUTE.encode(), len(body), body))
    await until(lambda: server.engine.asked, "the request to reach the engine")
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("stream", [False, True])
async def test_whoever_goes_away_is_not_answered_any_more(server, stream):
    async with asked(server, stream=stream):
        assert not server.idle()
    await until(server.idle, "the request to end")
    await server.sleeper.sleep()


async def test_an_answer_that_takes_too_long_is_an_error_of_openais_kind(server, monkeypatch):
    monkeypatch.setattr(openai_api, "PEOPLE_S", 0.2)
    async with aiohttp.ClientSession(server.url) as http, http.post(ROUTE, json=ASK) as answer:
        assert answer.status == 504
        error = (await answer.json())["error"]
    assert error["type"] == "server_error"
    assert "more than 0.2 s" in error["message"]
    assert server.idle()


async def test_whoever_does_not_read_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(openai_api, "PEOPLE_S", 1.0)
    async with asked(server, stream=True) as (reader, _):
        await until(server.idle, "the request to end")
        read = b""
        with contextlib.suppress(ConnectionError):
            read = await reader.read(-1)
    assert not read.endswith(b"0\r\n\r\n")  # It does not look whole.


async def test_a_request_that_the_engine_cannot_have_yet_does_not_reach_it(server):
    alone = server.engine.gate.alone()
    await alone.__aenter__()
    async with aiohttp.ClientSession(server.url) as http:
        asking = asyncio.create_task(http.post(ROUTE, json=ASK))
        await until(lambda: server.engine.let_in, "the request to come to the gate")
        assert server.engine.let_in == [ASK]
        assert not server.engine.asked
        await alone.__aexit__(None, None, None)
        await until(lambda: server.engine.asked, "the request to reach the engine")
        asking.cancel()
