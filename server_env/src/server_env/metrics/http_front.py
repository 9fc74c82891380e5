"""For people: /metrics, and the engines' OpenAI API when it is asked for. Only what samples or reads is passed on."""

from pathlib import Path

import aiohttp
from aiohttp import web

from bridge.errors import ConfigError
from server_env.config import loopback
from server_env.engines.engine import EngineGone
from server_env.metrics.metrics_page import CONTENT_TYPE, MetricsPage
from server_env.supervision.replicas import Replicas

PASSED = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/version")
"""Not among them: loading adapters, sleeping, and what else changes the engine under the trainer's feet."""

MAX_BODY_BYTES = 64 << 20
_NOT_PASSED = {
    *("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"),
    "authorization",  # OpenAI clients always send some key; the engine's own is added here.
}


class HttpFront:
    """`/metrics` on one address; with `replicas` also the least busy engine's API, answers passed on as they come.

    name: the setting that says where, for errors.
    """

    def __init__(self, name: str, page: MetricsPage, replicas: Replicas | None = None) -> None:
        self._name = name
        self._page = page
        self._replicas = replicas
        self._runner: web.AppRunner | None = None

    async def start(self, address: str | Path) -> str:
        """Listen on a loopback `host:port` (port 0: any free one) or on a Unix socket; the URL. Raises ConfigError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for route in PASSED if self._replicas else ():
            app.router.add_route("*", route, self._pass_on)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        if isinstance(address, Path):
            await web.UnixSite(self._runner, address).start()
            return f"unix:{address}"
        host, port = loopback(address, self._name)
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"{self._name}: cannot listen on {address}: {error.strerror}.", remedy="Use port 0."
            ) from None
        bound = self._runner.addresses[0]
        return f"http://{host}:{bound[1]}"

    async def stop(self) -> None:
        """Close the port."""
        if self._runner:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=(await self._page.text()).encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED}
        body = await request.read()
        assert self._replicas, "the routes are there only with them"
        try:
            engine = next(iter(self._replicas.serving().values()), self._replicas.engine)
            session = engine.http()
            async with session.request(request.method, request.rel_url.path_qs, data=body, headers=headers) as answer:
                return await _stream(request, answer)
        except (EngineGone, aiohttp.ClientConnectionError):
            return web.json_response({"error": {"message": "No engine is running just now."}}, status=503)


async def _stream(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED}
    response = web.StreamResponse(status=answer.status, headers=headers)
    await response.prepare(request)
    async for chunk in answer.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response
