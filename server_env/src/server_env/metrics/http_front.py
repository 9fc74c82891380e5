"""Where people reach the server over HTTP: /metrics, and the engines' OpenAI API when it is asked for."""

from pathlib import Path

from aiohttp import web

from bridge.errors import ConfigError
from server_env.config import loopback
from server_env.metrics.metrics_page import CONTENT_TYPE, MetricsPage
from server_env.metrics.openai_api import OpenAIApi

MAX_BODY_BYTES = 64 << 20


class HttpFront:
    """`/metrics` on one address, and the API if there is one.

    name: the setting that says where, for errors.
    """

    def __init__(self, name: str, page: MetricsPage, api: OpenAIApi | None = None) -> None:
        self._name = name
        self._page = page
        self._api = api
        self._runner: web.AppRunner | None = None

    async def start(self, address: str | Path) -> str:
        """Listen on a loopback `host:port` (port 0: any free one) or on a Unix socket; the URL. Raises ConfigError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        if self._api:
            self._api.add_routes(app.router)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
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
