"""SGLang's HTTP routes on a loopback port: what is asked, what of the answer is read, what its status codes mean."""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bridge.errors import EngineFailed, Refused
from bridge.protocol import Completion, Sampling
from server_env.adapters.peft_adapter import BaseModel
from server_env.config import ServerConfig
from server_env.engines import flags, sglang, sglang_memory
from server_env.engines import sglang_wire as wire
from server_env.engines.engine import Endpoint, EngineFacts, EngineGone, GpuMemory
from server_env.engines.engine_http import KEEP_ALIVE_S, EngineHttp
from server_env.engines.options import EngineOptions
from server_env.engines.sglang_lora import complete

HOST = "127.0.0.1"
PROBE_PROMPT = (1,)
NEEDED_ROUTES = ("/generate", "/load_lora_adapter", "/unload_lora_adapter", "/abort_request")
SLEEP_ROUTES = ("/release_memory_occupation", "/resume_memory_occupation", "/flush_cache")
KV_CACHE = {"tags": ["kv_cache"]}
"""What sleep gives back. Weights would come back as garbage unless SGLang keeps a copy of them in main memory."""

TOKEN_COUNTERS = ("sglang:realtime_tokens_total", "sglang:prompt_tokens_total", "sglang:generation_tokens_total")
"""The first grows at every step; the others when a request ends, and are all that older versions have."""

FLAT_TEMPERATURE = 1e6
"""At which all tokens are as likely, whatever the model thinks."""

DETERMINISTIC = "--enable-deterministic-inference"
"""Without it SGLang takes a request's seed and does not use it."""

ABORT_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 60.0
IDLE_POLL_S = 0.1
SHARED_PREFIX_TOKENS = 64
"""A group's prompt of fewer tokens is read by each of its samples."""
SHARED_PREFIX_FLOPS = 1e12
"""So much must be saved, on a GPU, by reading it once, ahead of its samples: a round trip more, of 20 to 60 ms."""


class SGLang:
    """SGLang as an `Engine`. Raises ConfigError at construction for options that it could not start with."""

    name = "sglang"

    def __init__(
        self, server: ServerConfig, native: sglang.SGLangConfig, device: str, installed: EngineOptions | None
    ) -> None:
        self.installed_version = installed.version if installed else flags.installed_version(sglang.DISTRIBUTIONS)
        self.options = sglang.resolve(server, native, device)
        self.model = self.options.model_path or ""
        self.max_lora_rank = self.options.max_lora_rank or 0
        self.adapter_slots = (self.options.max_loras_per_batch or 1) - 1
        self.adapters_held = self.options.max_loaded_loras or 0
        self.gpus = sglang.gpus(self.options)
        self.node_rank = self.options.node_rank or 0
        self._server = server
        self._device = device
        self._base = BaseModel.read(self.model)
        self._program = sglang.command(server.engine_command)
        self._installed = installed
        self._share = server.memory_share if device == "cuda" and native.mem_fraction_static is None else None
        self._arguments()  # Says now what this version does not have.
        self._http = EngineHttp("SGLang", "/health")
        self._admin: dict[str, str] = {}
        self._adapters: set[str] = set()
        self._released = False
        self._max_context = 0
        self._aborting: set[asyncio.Task[None]] = set()

    def command(self, endpoint: Endpoint) -> list[str]:
        """What to run."""
        where = ["--host", HOST, "--port", str(endpoint.port), "--config", str(_keys_file(endpoint))]
        return [*self._program, *where, "--device", self._device, *self._arguments(endpoint.gpus)]

    def environment(self, cache: Path, endpoint: Endpoint) -> Mapping[str, str]:
        """Variables for it."""
        return sglang.environment(self._server, self.options, self._device, cache, endpoint.scratch)

    def private_files(self, endpoint: Endpoint) -> Mapping[Path, str]:
        """The keys that close its routes to everybody else: a file, for argv and environment can be read by others."""
        return {_keys_file(endpoint): json.dumps({"api-key": endpoint.key, "admin-api-key": endpoint.admin_key})}

    async def connect(self, endpoint: Endpoint) -> None:
        """Talk to this endpoint from now on. One connection a request: their number is bounded by the bridge."""
        self._admin = _bearer(endpoint.admin_key)
        self._adapters.clear()
        self._released = False
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        await self._http.open(f"http://{HOST}:{endpoint.port}", connector, _bearer(endpoint.key))

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def probe(self) -> EngineFacts:
        """Ask for its version, routes, context length and one token."""
        self._base = BaseModel.read(self.model)  # The engine may have been the first to fetch it from the hub.
        version = wire.info.decode(await self._http.get("/server_info")).version
        await self._http.require(NEEDED_ROUTES, version)
        if await self._http.has("/ready"):
            await self._http.get("/ready")  # It is up before it has warmed up.
        models = wire.models.decode(await self._http.get("/v1/models")).data
        self._max_context = next((m.max_model_len - sglang.SPARE_CONTEXT for m in models if m.max_model_len), 0)
        await self._check_logprobs(version)
        can_sleep = bool(self.options.enable_memory_saver) and all([await self._http.has(r) for r in SLEEP_ROUTES])
        return EngineFacts(
            version=version,
            max_context=self._max_context,
            capabilities=frozenset({"lora", "score", *(["sleep"] if can_sleep else [])}),
        )

    async def _check_logprobs(self, version: str) -> None:
        """Sampled from a flat distribution, all tokens have the same logprob."""
        sampling = Sampling(max_tokens=4, temperature=FLAT_TEMPERATURE, ignore_eos=True)
        (completion,) = await self.generate("", PROBE_PROMPT, 1, sampling)
        found = memoryview(completion.logprobs).cast("f").tolist()
        if max(found) - min(found) > 1e-2:
            raise EngineFailed(
                f"SGLang {version} reports logprobs of another distribution than it samples from.",
                why="SGLANG_RETURN_ORIGINAL_LOGPROB is set, or this version leaves the temperature out.",
                remedy=f"Unset it. {self._http.other_version}",
            )

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> tuple[Completion, ...]:
        """N completions of one prompt, with logprobs at the sampling temperature.

        Where top_k, top_p or min_p cut the distribution, those are asked for that SGLang reports of what was left.
        """
        if sampling.seed is not None and DETERMINISTIC not in self.options.extra_args:
            raise Refused(
                "SGLang does not use a request's seed as it was started.",
                remedy=f'Leave the seed out, or set sglang.extra_args = ["{DETERMINISTIC}"].',
            )
        if self._reads_first(len(prompt), n):
            await self._ask(adapter, prompt, [wire.SamplingParams(max_new_tokens=0, temperature=1.0)])
        cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        wanted = [self._sampling(sampling, len(prompt), i) for i in range(n)]
        answers = await self._ask(adapter, prompt, wanted, return_logprob=True, return_sampling_mask=cut)
        ends = sampling.stop_token_ids if sampling.ignore_eos else ()  # SGLang would ignore them as well.
        return tuple(self._completion(answer, cut=cut, ends=ends) for answer in answers)

    def _reads_first(self, prompt_tokens: int, n: int) -> bool:
        """Whether a group's prompt is read once, ahead of its samples, which then find it in the prefix cache."""
        if n == 1 or prompt_tokens < SHARED_PREFIX_TOKENS or self.options.disable_radix_cache:
            return False
        saved = (n - 1) * prompt_tokens * self._base.flops
        return self._device == "cpu" or not saved or saved >= SHARED_PREFIX_FLOPS

    async def score(self, adapter: str, token_ids: Sequence[int]) -> list[float]:
        """Untempered logprobs of all tokens but the first."""
        nothing = wire.SamplingParams(max_new_tokens=0, temperature=1.0)
        (answer,) = await self._ask(adapter, token_ids, [nothing], return_logprob=True, logprob_start_len=0)
        found = answer.meta_info.input_token_logprobs
        self._http.all_of(found, len(token_ids), "scores")
        return [logprob for logprob, _, _ in found[1:] if logprob is not None]

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a PEFT folder, made whole where SGLang needs it, and see that SGLang lists it."""
        await asyncio.to_thread(complete, path, self._base)
        answer = await self._http.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, self._admin)
        if name not in wire.loaded.decode(answer).loaded_adapters:
            raise EngineFailed(f"SGLang said that it loaded adapter {name}, and does not list it.")
        self._adapters.add(name)

    async def unload_adapter(self, name: str) -> None:
        """Unload a name. SGLang waits for its requests meanwhile, and everything else about adapters waits too."""
        self._known(name)
        self._adapters.discard(name)
        await self._http.post("/unload_lora_adapter", {"lora_name": name}, self._admin)

    async def sleep(self) -> None:
        """Give the KV cache's memory back."""
        await self._until_idle()
        await self._http.post("/release_memory_occupation", KV_CACHE, self._admin)
        self._released = True

    async def _until_idle(self) -> None:
        """Return when it works on nothing. A cancelled request may be gone later than whoever asked, and asked for its
        memory before, SGLang dies.
        """
        while self._aborting:
            await asyncio.wait(set(self._aborting))
        until = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            try:
                await self._http.post("/flush_cache", None, self._admin)  # What it does only when it is idle.
            except Refused as busy:
                if time.monotonic() > until:
                    raise EngineFailed(
                        f"SGLang was still working {IDLE_TIMEOUT_S:g} s after its last request, so it cannot sleep.",
                        why=f"A request of somebody else's, through server.http, or a cancelled one. {busy.what}",
                        remedy="End what else asks this engine; its log says how many requests are left.",
                    ) from None
                await asyncio.sleep(IDLE_POLL_S)
            else:
                return

    async def wake_weights(self) -> None:
        """Nothing to do: the weights stayed."""

    async def wake(self) -> None:
        """Take the KV cache's memory again. Asked for memory that it did not give back, SGLang would die."""
        if self._released:
            await self._http.post("/resume_memory_occupation", KV_CACHE, self._admin)
            self._released = False

    def http(self) -> aiohttp.ClientSession:
        """The connection to the running engine. Raises EngineGone while there is none."""
        return self._http.session()

    def people(self, body: bytes) -> contextlib.AbstractAsyncContextManager[None]:  # noqa: ARG002 (another engine reads it)
        """At any time."""
        return contextlib.nullcontext()

    async def progress(self) -> float:
        """Tokens read and written so far; without metrics only whether it answers."""
        if self.options.enable_metrics:
            return await self._http.counters(TOKEN_COUNTERS)
        await self._http.get("/health")
        return time.monotonic()

    def _arguments(self, visible: Sequence[GpuMemory] = ()) -> list[str]:
        """Its options. visible: the GPUs that it may see. Its share is worked out from those that are its own."""
        options, first = self.options, self.options.base_gpu_id or 0
        count = self.gpus // (options.nnodes or 1)
        own = visible[first : first + count]
        if self._share is not None and len(own) == count:
            fraction = sglang_memory.measured(self._share, own)
            options = msgspec.structs.replace(options, mem_fraction_static=fraction)
        return sglang.arguments(options, self._installed)

    def _known(self, adapter: str) -> None:
        """SGLang would load an adapter that it has unloaded again, from files that may be gone, and say nothing."""
        if adapter not in self._adapters:
            raise Refused(f"SGLang answered 404: adapter {adapter} is not loaded.")

    def _sampling(self, sampling: Sampling, prompt_tokens: int, index: int) -> wire.SamplingParams:
        """SGLang refuses what could pass the end of the context, where others stop there."""
        room = self._max_context - prompt_tokens
        return wire.SamplingParams(
            max_new_tokens=min(sampling.max_tokens, room) if room > 0 else sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            sampling_seed=None if sampling.seed is None else sampling.seed + index,
            stop_token_ids=sampling.stop_token_ids or None,
            ignore_eos=sampling.ignore_eos,
        )

    async def _ask(
        self, adapter: str, prompt: Sequence[int], samplings: list[wire.SamplingParams], **options: Any
    ) -> list[wire.Generated]:
        """One answer for each sampling. Cancelled, nothing of it goes on running."""
        if adapter:
            self._known(adapter)
        self._check(prompt, max(sampling.max_new_tokens for sampling in samplings))
        rids = [uuid.uuid4().hex for _ in samplings]
        ask = wire.Generate(
            rid=rids,
            input_ids=[prompt] * len(samplings),
            sampling_params=samplings,
            lora_path=adapter or None,
            **options,
        )
        try:
            answers = wire.generated.decode(await self._http.post("/generate", ask))
        except asyncio.CancelledError:
            self._abort(rids)
            raise
        self._http.all_of(answers, len(samplings), "completions")
        return answers

    def _check(self, prompt: Sequence[int], new_tokens: int) -> None:
        """An empty prompt in a batch ends SGLang's scheduler, as does a token id without a row in the embedding."""
        if not prompt or len(prompt) + new_tokens > self._max_context > 0:
            raise Refused(
                f"SGLang answered 400: a prompt of {len(prompt)} tokens, where the context has {self._max_context}."
            )
        most = self._base.vocab_size
        wrong = [token for token in prompt if token < 0 or 0 < most <= token]
        if wrong:
            raise Refused(f"Token id {wrong[0]} is out of the model's vocabulary of {most}.")

    def _abort(self, rids: Sequence[str]) -> None:
        """Closing the connection is not enough: SGLang looks for that every few seconds only."""
        task = asyncio.create_task(self._abort_all(rids))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort_all(self, rids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                for rid in rids:
                    await self._http.post("/abort_request", {"rid": rid}, self._admin)
        except (EngineGone, EngineFailed, Refused, TimeoutError):
            pass  # Without it the request ends some seconds later.

    def _completion(self, answer: wire.Generated, *, cut: bool, ends: Sequence[int]) -> Completion:
        """cut: the distribution was. ends: tokens that end a completion."""
        meta = answer.meta_info
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        if cut:
            if meta.output_token_sampling_logprobs is None:
                raise Refused(
                    "This version of SGLang reports logprobs from before top_k, top_p and min_p only.",
                    remedy="Sample without them, or use a newer version.",
                )
            logprobs = meta.output_token_sampling_logprobs
        ids, reason = answer.output_ids, meta.finish_reason.type
        length = next((i + 1 for i, token in enumerate(ids) if token in ends), 0)
        if length:
            ids, logprobs, reason = ids[:length], logprobs[:length], "stop"
        return self._http.completion(ids, logprobs, reason)


def _keys_file(endpoint: Endpoint) -> Path:
    return endpoint.socket.with_suffix(".yaml")  # JSON is YAML.


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
