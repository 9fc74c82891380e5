"""For people: the engines' OpenAI API and one /metrics on a loopback port. Only what samples or reads is passed on."""

import ipaddress
from collections.abc import Callable

import aiohttp
from aiohttp import web

from bridge.errors import ConfigError
from server_env.engine import EngineGone
from server_env.prometheus import merged
from server_env.replicas import Replicas

PASSED = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/version")
"""Not among them: loading adapters, sleeping, and what else changes the engine under the trainer's feet."""

MAX_BODY_BYTES = 64 << 20
_NOT_PASSED = {
    *("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"),
    "authorization",  # OpenAI clients always send some key; the engine's own is added here.
}


class HttpFront:
    """A small proxy in front of the least busy engine's own API. Answers are passed on as they come, streams too.

    own_metrics: Prometheus text about the server itself, added to that of all engines.
    """

    def __init__(self, replicas: Replicas, own_metrics: Callable[[], str]) -> None:
        self._replicas = replicas
        self._own_metrics = own_metrics
        self._runner: web.AppRunner | None = None

    async def start(self, address: str) -> str:
        """Listen on `host:port` (port 0: any free one); the URL. Raises ConfigError, also for any host but loopback."""
        host, port = _parse(address)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for route in PASSED:
            app.router.add_route("*", route, self._pass_on)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            raise ConfigError(f"http: cannot listen on {address}: {error.strerror}.", remedy="Use port 0.") from None
        bound = self._runner.addresses[0]
        return f"http://{host}:{bound[1]}"

    async def stop(self) -> None:
        """Close the port."""
        if self._runner:
            await self._runner.cleanup()

    async def _metrics(self, _request: web.Request) -> web.Response:
        texts: dict[int, str] = {}
        for number, engine in self._replicas.serving().items():
            try:
                async with engine.http().get("/metrics") as answer:
                    texts[number] = await answer.text()
            except (EngineGone, aiohttp.ClientError):
                pass  # The server's own figures say what state the engines are in.
        return web.Response(text=merged(texts) + self._own_metrics(), content_type="text/plain")

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED}
        body = await request.read()
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


def _parse(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise ConfigError(f"http: expected host:port, got {address!r}.", remedy='For example http = "127.0.0.1:8000".')
    host = "127.0.0.1" if host in ("", "localhost") else host
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            f"http: {host} is not a loopback address.",
            why="This port has no encryption and no password.",
            remedy="Use 127.0.0.1, and an SSH tunnel from elsewhere.",
        )
    return host, int(port)
