"""The engines' OpenAI API for people, whose requests keep the rules of the trainer's.

None reaches an engine that sleeps, a sleep waits for those in flight, an adapter stays while it is asked, and what
would end an engine is refused. The trainer waits for none of them longer than PEOPLE_S.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from bridge.errors import BridgeError
from server_env.adapters.peft_adapter import BaseModel
from server_env.adapters.versions import Adapters
from server_env.engines.engine import Engine, EngineGone
from server_env.gpus.sleeping import Sleeper
from server_env.supervision.replicas import Replicas

SAMPLING = ("/v1/completions", "/v1/chat/completions")
READING = ("/v1/models", "/version")
HEALTH = "/health"
"""Answered here: SGLang samples a token to say that it is well, whether it sleeps or not."""

NO_SUCH_MODEL, NOT_NOW, TOO_LONG = 404, 503, 504
RETRY_AFTER_S = 10
PEOPLE_S = 60.0
"""For a whole answer, read to its end by whoever asked: less than the trainer waits for the server to fall asleep."""
_NOT_PASSED = {
    *("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"),
    "authorization",  # OpenAI clients always send some key; the engine's own is added here.
}


class Ask(msgspec.Struct, frozen=True):
    """What is read of a request, in either engine's words. lora_path, input_ids: SGLang's."""

    model: str = ""
    prompt: str | list[str | int | list[int]] | None = None
    input_ids: list[int] | None = None
    lora_path: str | list[str | None] | None = None
    n: int | None = None

    def adapters(self, base: str) -> set[str]:
        """Names of adapters that only an adapter can have: after a colon, or as a lora_path. base: the model's name."""
        named = self.model.rpartition(":")[2].strip() if ":" in self.model and self.model != base else ""
        paths = self.lora_path if isinstance(self.lora_path, list) else [self.lora_path]
        return {name for name in (named, *paths) if name}

    def prompts(self) -> Iterator[str | list[int]]:
        """Texts and token ids, one prompt after the other. Raises ValueError for a list of several kinds of things."""
        given: list[Any] = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if len({type(one) for one in given}) > 1:
            raise ValueError("A prompt is a text, a list of texts, of token ids, or of lists of token ids.")
        yield from (
            one for one in ([given] if all(isinstance(one, int) for one in given) else given) if one is not None
        )
        if self.input_ids is not None:
            yield self.input_ids


def why_not(ask: Ask, vocabulary: int) -> str:
    """Why an engine must not be asked this; empty when it may be. vocabulary: tokens of the model; 0: not known."""
    try:
        prompts = list(ask.prompts())
    except ValueError as error:
        return str(error)
    if not all(prompts):
        return "A prompt is empty."
    tokens = (token for prompt in prompts if not isinstance(prompt, str) for token in prompt)
    wrong = next((token for token in tokens if token < 0 or 0 < vocabulary <= token), None)
    return "" if wrong is None else f"Token id {wrong} is out of the model's vocabulary of {vocabulary}."


class Refusal(Exception):
    """A request that no engine is asked: the answer to it, as OpenAI puts errors."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < NOT_NOW else "server_error"
        code = "model_not_found" if status == NO_SUCH_MODEL else None
        self.answer = web.json_response(
            {"error": {"message": message, "type": kind, "param": None, "code": code}},
            status=status,
            headers={"Retry-After": str(RETRY_AFTER_S)} if status == NOT_NOW else None,
        )


class OpenAIApi:
    """What is passed on to the least busy engine; its answers come back as they are made."""

    def __init__(self, replicas: Replicas, adapters: Adapters, sleeper: Sleeper) -> None:
        self._replicas = replicas
        self._adapters = adapters
        self._sleeper = sleeper

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Only what samples or reads: not loading adapters, sleeping, and what else changes the engine."""
        for route in SAMPLING:
            router.add_route("*", route, self._sample)
        for route in READING:
            router.add_route("*", route, self._read)
        router.add_get(HEALTH, self._health)

    async def _health(self, _request: web.Request) -> web.Response:
        """Whether an engine serves; one that sleeps is well."""
        status = 200 if self._replicas.serving() else NOT_NOW
        return web.json_response({"engine": self._replicas.state, "asleep": self._sleeper.asleep}, status=status)

    async def _read(self, request: web.Request) -> web.StreamResponse:
        engine = next(iter(self._replicas.serving().values()), self._replicas.engine)
        try:
            return await _passed_on(engine, request, await request.read())
        except (EngineGone, aiohttp.ClientConnectionError):
            return Refusal(NOT_NOW, "No engine is running just now.").answer

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            ask = self._checked(body)
            adapter, version = self._under(ask)
            self._require_awake()
            async with (
                asyncio.timeout(PEOPLE_S),
                self._adapters.lease(version, 0),
                self._sleeper.working(),
                self._replicas.one(adapter, max(1, ask.n or 1)) as engine,
                engine.people(body),
            ):
                return await _passed_on(engine, request, body)
        except Refusal as refusal:
            return refusal.answer
        except (EngineGone, aiohttp.ClientConnectionError):
            return Refusal(NOT_NOW, "The engine was lost before it had answered.").answer
        except BridgeError as error:
            return Refusal(NOT_NOW, error.what).answer
        except TimeoutError:
            return Refusal(TOO_LONG, f"The answer took more than {PEOPLE_S:g} s: ask for fewer tokens at once.").answer

    def _checked(self, body: bytes) -> Ask:
        """A request that does an engine no harm."""
        try:
            ask = msgspec.json.decode(body or b"{}", type=Ask)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refusal(400, f"This is no request of the OpenAI API: {error}") from None
        base = self._adapters.base
        if not base.vocab_size:  # The engine may have been the first to fetch the model.
            base = BaseModel.read(self._replicas.engine.model)
        if wrong := why_not(ask, base.vocab_size):
            raise Refusal(400, wrong)
        return ask

    def _under(self, ask: Ask) -> tuple[str, int]:
        """The adapter that it names, and a version that is this adapter; an empty name and 0 for the base model."""
        named = ask.adapters(self._replicas.engine.model)
        if self._adapters.was_published(ask.model):  # vLLM's adapters are models.
            named.add(ask.model)
        versions = {name: self._adapters.version_of(name) for name in sorted(named)}
        if missing := next((name for name, version in versions.items() if version is None), ""):
            raise Refusal(NO_SUCH_MODEL, f"No adapter {missing!r} is served.")
        served = [(name, version) for name, version in versions.items() if version is not None]
        if len(served) > 1:
            raise Refusal(400, "One request can name one adapter.")
        return served[0] if served else ("", 0)

    def _require_awake(self) -> None:
        if self._sleeper.asleep:
            raise Refusal(NOT_NOW, "The engine sleeps: the GPU's memory is the trainer's, or no trainer is there.")
        if not self._replicas.serving():
            raise Refusal(NOT_NOW, "No engine is running just now.")


async def _passed_on(engine: Engine, request: web.Request, body: bytes) -> web.StreamResponse:
    """The engine's answer. Raises EngineGone and ClientConnectionError when there is none.

    Cancelled, it ends the connection of an answer that has begun.
    """
    headers = {k: v for k, v in request.headers.items() if k.lower() not in _NOT_PASSED}
    async with engine.http().request(request.method, request.rel_url.path_qs, data=body, headers=headers) as answer:
        kept = {k: v for k, v in answer.headers.items() if k.lower() not in _NOT_PASSED}
        response = web.StreamResponse(status=answer.status, headers=kept)
        await response.prepare(request)
        whole = False
        try:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                whole = True
        finally:
            if request.transport and not whole:  # Half an answer must not look like a whole one.
                request.transport.abort()  # To close it could take for ever: it would wait for whoever does not read.
        return response
