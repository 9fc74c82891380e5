"""An engine asked without Tandem, over its own HTTP routes: the floor and the peer of what goes through the bridge.

It shares no code with server_env's clients of the same routes: what those cost would otherwise be on both sides.
"""

import asyncio
import contextlib
import errno
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
import msgspec

from bridge.protocol import Sampling

QUEUE_FULL = (errno.EAGAIN, errno.EINVAL, errno.ENOTCONN)
"""How a Unix socket refuses when too many connections wait to be accepted: the only thing that is tried again."""
BASE = "base"
"""vLLM's name for the base model, as tandem-server starts it."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Completion:
    """One sampled completion."""

    token_ids: list[int]
    logprobs: list[float]


class _Listening(msgspec.Struct):
    socket: str
    port: str
    key: str
    admin_key: str


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs


class _Choices(msgspec.Struct):
    choices: list[_Choice]


class _Meta(msgspec.Struct):
    output_token_logprobs: list[tuple[float, int, Any]]


class _Output(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


_choices = msgspec.json.Decoder(_Choices)
_outputs = msgspec.json.Decoder(list[_Output])


class Direct:
    """One engine. Calls raise RuntimeError for an answer other than 200. An empty adapter name is the base model."""

    keep_alive_s: float
    """How long an unused connection is kept: below what the engine does."""

    def __init__(self, session: aiohttp.ClientSession, admin: dict[str, str]) -> None:
        self._session = session
        self._admin = admin

    @classmethod
    async def open(cls, listening: Path) -> Self:
        """Talk to the engine that `listening.py` wrote that file about. One connection a request, kept alive."""
        found = msgspec.json.decode(listening.read_bytes(), type=_Listening)
        kept: dict[str, Any] = {"limit": 0, "keepalive_timeout": cls.keep_alive_s}
        local = bool(found.socket)
        connector = aiohttp.UnixConnector(found.socket, **kept) if local else aiohttp.TCPConnector(**kept)
        url = "http://engine" if local else f"http://127.0.0.1:{found.port}"
        headers = _bearer(found.key) | {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None)
        session = aiohttp.ClientSession(url, connector=connector, headers=headers, timeout=timeout)
        return cls(session, _bearer(found.admin_key))

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """N completions of one prompt, with the logprobs of the sampled tokens."""
        raise NotImplementedError

    async def load(self, name: str, folder: Path) -> None:
        """Load an adapter's folder under a name."""
        raise NotImplementedError

    async def unload(self, name: str) -> None:
        """Forget it."""
        raise NotImplementedError

    async def _post(self, route: str, body: Any, headers: dict[str, str] | None = None) -> bytes:
        data = _encode(body)
        while True:
            try:
                async with self._session.post(route, data=data, headers=headers) as answer:
                    said = await answer.read()
            except aiohttp.ClientConnectorError as error:
                if error.os_error.errno not in QUEUE_FULL:
                    raise
                await asyncio.sleep(random.uniform(0.01, 0.03))
                continue
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} to POST {route}: {said.decode(errors='replace')[:500]}")
            return said


class VLLM(Direct):
    """vLLM's OpenAI completions."""

    keep_alive_s = 60.0  # tandem-server has vLLM keep them for 75.

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """One request; every sampling parameter is given, as tandem-server gives it."""
        body = {
            "model": adapter or BASE,
            "prompt": prompt,
            "n": n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        answer = _choices.decode(await self._post("/v1/completions", body))
        return [Completion(choice.token_ids, choice.logprobs.token_logprobs) for choice in answer.choices]

    async def load(self, name: str, folder: Path) -> None:
        """Load a PEFT folder."""
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload(self, name: str) -> None:
        """Forget a name."""
        await self._post("/v1/unload_lora_adapter", {"lora_name": name})


class SGLang(Direct):
    """SGLang's native route."""

    keep_alive_s = 4.0  # SGLang has them for 5.

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Completion]:
        """One request of n prompts: with n = 8 in place of it some versions lose count of an adapter's users."""
        parameters = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
        }
        body = {"input_ids": [prompt] * n, "sampling_params": [parameters] * n, "return_logprob": True}
        answer = _outputs.decode(await self._post("/generate", body | ({"lora_path": adapter} if adapter else {})))
        return [
            Completion(output.output_ids, [logprob for logprob, _, _ in output.meta_info.output_token_logprobs])
            for output in answer
        ]

    async def load(self, name: str, folder: Path) -> None:
        """Load a PEFT folder that covers whole stacks of projections."""
        await self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, self._admin)

    async def unload(self, name: str) -> None:
        """Unload a name."""
        await self._post("/unload_lora_adapter", {"lora_name": name}, self._admin)


Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on the loop's thread, and waits for what it returns."""


@contextlib.contextmanager
def connected(backend: str, listening: Path) -> Iterator[tuple[Direct, Run]]:
    """The engine of that backend, and a loop to ask it on. That has a thread of its own, as the bridge's client has."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    try:
        engine: Direct = run({"vllm": VLLM, "sglang": SGLang}[backend].open(listening))
        try:
            yield engine, run
        finally:
            run(engine.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}
