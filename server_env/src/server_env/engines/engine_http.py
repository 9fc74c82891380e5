"""What asking an engine over HTTP has in common: the connection, what a status code means, what an answer must hold."""

import asyncio
import errno
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import aiohttp
import msgspec

from bridge.errors import EngineFailed, Refused
from bridge.protocol import Completion, pack_ids, pack_logprobs
from server_env.engines.engine import EngineGone

KEEP_ALIVE_S = 15.0
"""How long an unused connection is kept: below what the engines do."""

QUEUE_FULL = (errno.EAGAIN, errno.EINVAL, errno.ENOTCONN)
"""How connecting to a Unix socket fails when too many others are about to be accepted. asyncio takes the EAGAIN for a
connection in progress, and finds out at its first use."""

QUEUE_FULL_PAUSE_S = 0.02

_FINISH: dict[str | None, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}
_encode = msgspec.json.Encoder().encode


class EngineHttp:
    """The HTTP side of an engine. title: its name for people. health: a route that says 200 while the engine lives.

    Calls raise EngineGone when the engine is dead or dying, Refused for 4xx and EngineFailed for other failures.
    """

    def __init__(self, title: str, health: str) -> None:
        self.title = title
        self.other_version = f"Use a version of {title} that envs.lock names."
        self._health = health
        self._session: aiohttp.ClientSession | None = None

    async def open(self, url: str, connector: aiohttp.BaseConnector, headers: Mapping[str, str] | None = None) -> None:
        """Talk to this address from now on, with these headers on every request."""
        await self.close()
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers)

    async def close(self) -> None:
        """Close all connections: requests in flight end with EngineGone."""
        session, self._session = self._session, None
        if session:
            await session.close()

    def session(self) -> aiohttp.ClientSession:
        """The connection to the running engine. Raises EngineGone while there is none."""
        if self._session is None:
            raise EngineGone(f"{self.title} is not running.")
        return self._session

    async def get(self, route: str) -> bytes:
        """The body of a 2xx."""
        return await self._good("GET", route, None, None)

    async def post(self, route: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
        """The body of a 2xx. body: whatever msgspec writes as JSON; None for an empty one."""
        return await self._good("POST", route, None if body is None else _encode(body), headers)

    async def require(self, routes: Sequence[str], version: str) -> None:
        """Raise EngineFailed unless the engine has all of these routes."""
        missing = [route for route in routes if not await self.has(route)]
        if missing:
            raise EngineFailed(
                f"{self.title} {version} has no route {', '.join(missing)}.",
                why="This version moved it, or was started without runtime adapter loading.",
                remedy=self.other_version,
            )

    async def has(self, route: str) -> bool:
        """Whether a route exists: with a method that none takes, engines say 405 if it does and 404 if not."""
        return (await self._request("PATCH", route, None, None))[0] != 404

    async def counters(self, names: Sequence[str]) -> float:
        """The sum of these Prometheus counters, over all labels."""
        lines = (await self.get("/metrics")).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(tuple(names)))

    def completion(self, ids: list[int] | None, logprobs: Iterable[float | None], finish: str | None) -> Completion:
        """One completion as it goes to the trainer. Raises EngineFailed for an answer that lacks something."""
        kept = [logprob for logprob in logprobs if logprob is not None]
        reason = _FINISH.get(finish)
        if reason is None or ids is None or len(kept) != len(ids):
            raise EngineFailed(
                f"{self.title}'s answer lacks token ids, logprobs or a known finish reason ({finish!r}).",
                remedy=self.other_version,
            )
        return Completion(pack_ids(ids), pack_logprobs(kept), reason)

    def all_of(self, found: Sequence[Any], wanted: int, what: str) -> None:
        """Raise EngineFailed unless as many were answered as were asked for."""
        if len(found) != wanted:
            raise EngineFailed(f"{self.title} answered {len(found)} {what} where {wanted} were asked for.")

    async def _good(self, method: str, route: str, body: bytes | None, headers: Mapping[str, str] | None) -> bytes:
        """The body of a 2xx; anything else is raised. 5xx is also the last word of a dying engine."""
        status, answer = await self._request(method, route, body, headers)
        if 200 <= status < 300:
            return answer
        what = f"{self.title} answered {status} to {method} {route.partition('?')[0]}: {_message(answer)}"
        if status < 500:
            raise Refused(what)
        if (await self._request("GET", self._health, None, None))[0] != 200:
            raise EngineGone(what)
        raise EngineFailed(what)

    async def _request(
        self, method: str, route: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> tuple[int, bytes]:
        typed = {} if body is None else {"Content-Type": "application/json"}
        sent = {**typed, **(headers or {})}
        while True:
            try:
                async with self.session().request(method, route, data=body, headers=sent) as answer:
                    return answer.status, await answer.read()
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno not in QUEUE_FULL:
                    raise EngineGone(f"{method} {route}: {error!r}") from error
                await asyncio.sleep(random.uniform(0.5, 1.5) * QUEUE_FULL_PAUSE_S)  # noqa: S311 (spreads retries)
            except (aiohttp.ClientError, ConnectionError) as error:
                raise EngineGone(f"{method} {route}: {error!r}") from error


def _message(body: bytes) -> str:
    """What an error body says, in the words of either engine."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = None
    if isinstance(said, dict):
        for key in ("error", "error_message", "detail", "message"):
            inner = said.get(key)
            inner = inner.get("message") if isinstance(inner, dict) else inner
            if inner:
                return str(inner)
    return body.decode(errors="replace")[:500]
