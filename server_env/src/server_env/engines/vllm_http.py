"""vLLM's HTTP routes over its Unix socket: what is asked, what of the answer is read, what its status codes mean."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import aiohttp
import msgspec

from bridge.errors import EngineFailed, Refused
from bridge.protocol import Completion, Sampling, unpack_ids, unpack_logprobs
from server_env.config import ServerConfig
from server_env.engines import flags, vllm
from server_env.engines.engine import Endpoint, EngineFacts
from server_env.engines.engine_http import KEEP_ALIVE_S, EngineHttp
from server_env.engines.gate import Gate
from server_env.engines.options import EngineOptions

PROBE_PROMPT = (1,)
PROBE_NOISE = 0.25
"""Logprobs of the same distribution differ by less, whatever the precision."""
PROBE_UNLIKELY = -2.0
"""Below this logprob a token shows the difference: among the likeliest few it would have a higher one."""

NEEDED_ROUTES = ("/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
SLEEP_ROUTES = ("/sleep", "/wake_up")
TOKEN_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class _Ask(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """POST /v1/completions. All sampling parameters are given: what is left out vLLM takes from the model's files."""

    model: str
    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    n: int = 1
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True


_NULL = msgspec.Raw(b"null")
_NO = (_NULL, msgspec.Raw(b"false"))


class _PeopleAsk(msgspec.Struct, frozen=True):
    """What has vLLM score a prompt in a request of people's, as it came. For an echo it may do so by default."""

    prompt_logprobs: msgspec.Raw = _NULL
    echo: msgspec.Raw = _NULL

    @property
    def scores(self) -> bool:
        """Whether it may."""
        return self.prompt_logprobs != _NULL or self.echo not in _NO


class _Logprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float | None]


class _PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float


class _Choice(msgspec.Struct, frozen=True):
    index: int
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None


class _Completions(msgspec.Struct, frozen=True):
    model: str
    choices: list[_Choice]


class _Model(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Version(msgspec.Struct, frozen=True):
    version: str


_completions = msgspec.json.Decoder(_Completions)
_models = msgspec.json.Decoder(_Models)
_people_ask = msgspec.json.Decoder(_PeopleAsk)
_version = msgspec.json.Decoder(_Version)


class VLLM:
    """vLLM as an `Engine`. Raises ConfigError at construction for options that it could not start with."""

    name = "vllm"

    def __init__(
        self, server: ServerConfig, native: vllm.VLLMConfig, device: str, installed: EngineOptions | None
    ) -> None:
        self.installed_version = installed.version if installed else flags.installed_version(vllm.DISTRIBUTIONS)
        self.options = vllm.resolve(server, native, device, installed)
        self.model = self.options.model or ""
        self.max_lora_rank = self.options.max_lora_rank or 0
        self.adapter_slots = self.options.max_loras or 0
        self.adapters_held = self.options.max_cpu_loras or 0
        self.gpus = vllm.gpus(self.options)
        self.node_rank = self.options.node_rank or 0
        self._server = server
        self._device = device
        self._program = vllm.command(server.engine_command, headless=bool(self.options.headless))
        self._arguments = vllm.arguments(self.options, installed)
        self._http = EngineHttp("vLLM", "/health")
        self._gate = Gate(open=device != "cpu")

    def command(self, endpoint: Endpoint) -> list[str]:
        """What to run."""
        own = ["--served-model-name", vllm.BASE_NAME, "--uds", str(endpoint.socket)]
        return [*self._program, *own, *self._arguments]

    def environment(self, cache: Path, endpoint: Endpoint) -> Mapping[str, str]:
        """Variables for it."""
        return vllm.environment(self._server, self.options, self._device, cache, endpoint.scratch)

    def private_files(self, endpoint: Endpoint) -> Mapping[Path, str]:  # noqa: ARG002 (another engine needs it)
        """None: who may enter the socket's folder may ask."""
        return {}

    async def connect(self, endpoint: Endpoint) -> None:
        """Talk to this endpoint from now on. One connection a request: their number is bounded by the bridge."""
        connector = aiohttp.UnixConnector(str(endpoint.socket), limit=0, keepalive_timeout=KEEP_ALIVE_S)
        await self._http.open("http://vllm", connector)

    async def close(self) -> None:
        """Close all connections. vLLM aborts a request whose connection closes."""
        await self._http.close()

    async def probe(self) -> EngineFacts:
        """Ask for its version, routes, context length and one token."""
        version = _version.decode(await self._http.get("/version")).version
        await self._http.require(NEEDED_ROUTES, version)
        models = _models.decode(await self._http.get("/v1/models")).data
        await self._check_logprobs(version)
        # On CPU the routes exist, answer 200 and do nothing.
        can_sleep = bool(self.options.enable_sleep_mode) and all([await self._http.has(r) for r in SLEEP_ROUTES])
        return EngineFacts(
            version=version,
            max_context=next((m.max_model_len for m in models if m.max_model_len), 0),
            capabilities=frozenset({"lora", "score", *(["sleep"] if can_sleep else [])}),
        )

    async def _check_logprobs(self, version: str) -> None:
        """Of the likeliest token alone the logprob is 0 (a little less, when some tie), and not what scoring says.

        A model that is sure of that token says nothing here; one that is nearly uniform says it as loud as any.
        """
        sampling = Sampling(max_tokens=4, top_k=1, ignore_eos=True)
        (completion,) = await self.generate("", PROBE_PROMPT, 1, sampling)
        sampled, ids = unpack_logprobs(completion.logprobs), unpack_ids(completion.token_ids)
        scored = (await self.score("", [*PROBE_PROMPT, *ids]))[-len(ids) :]
        pairs = [(a, b) for a, b in zip(sampled, scored, strict=True) if b < PROBE_UNLIKELY]
        if pairs and max(abs(a - b) for a, b in pairs) < PROBE_NOISE:
            raise EngineFailed(
                f"vLLM {version} reports logprobs of another distribution than it samples from.",
                why="--logprobs-mode processed_logprobs has no effect in this version.",
                remedy=self._http.other_version,
            )

    async def generate(self, adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> tuple[Completion, ...]:
        """N completions of one prompt."""
        async with self._gate.shared():
            answer = await self._complete(_ask(adapter, prompt, n, sampling))
        self._http.all_of(answer.choices, n, "completions")
        return tuple(self._completion(choice) for choice in sorted(answer.choices, key=lambda choice: choice.index))

    async def score(self, adapter: str, token_ids: Sequence[int]) -> list[float]:
        """Untempered logprobs of all tokens but the first: vLLM scores prompts before temperature in every mode.

        Under an adapter, and in a batch with any other request, vLLM 0.32 takes the batch's adapters for those of the
        prompt's tokens and ends ("einsum(): subscript b has size 2 …"): on a CPU, that is, so there it has it alone.
        """
        ask = _ask(adapter, token_ids, 1, Sampling(max_tokens=1))
        async with self._gate.alone():
            answer = await self._complete(msgspec.structs.replace(ask, prompt_logprobs=0, logprobs=None))
        found = answer.choices[0].prompt_logprobs or []
        self._http.all_of(found, len(token_ids), "scores")
        return [entry[token].logprob for token, entry in zip(token_ids[1:], found[1:], strict=True) if entry]

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load a PEFT folder, and see that vLLM lists it."""
        try:
            await self._http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except EngineFailed as error:  # vLLM has 500 for every adapter that it cannot use.
            raise Refused(error.what) from None
        if name not in {model.id for model in _models.decode(await self._http.get("/v1/models")).data}:
            raise EngineFailed(f"vLLM said that it loaded adapter {name}, and does not list it.")

    async def unload_adapter(self, name: str) -> None:
        """Forget a name. The weights stay in vLLM's cache until newer ones push them out."""
        await self._http.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self) -> None:
        """Move weights to main memory, drop the KV cache. Level 2 would lose the weights."""
        await self._http.post("/sleep?level=1", None)

    async def wake_weights(self) -> None:
        """Bring the weights back: adapters can be loaded."""
        await self._http.post("/wake_up?tags=weights", None)

    async def wake(self) -> None:
        """Bring the KV cache back."""
        await self._http.post("/wake_up?tags=kv_cache", None)

    def http(self) -> aiohttp.ClientSession:
        """The connection to the running engine. Raises EngineGone while there is none."""
        return self._http.session()

    def people(self, body: bytes) -> AbstractAsyncContextManager[None]:
        """Alone when a prompt is scored, for what `score` says."""
        return self._gate.alone() if _people_ask.decode(body or b"{}").scores else self._gate.shared()

    async def progress(self) -> float:
        """Tokens read and written so far."""
        return await self._http.counters(TOKEN_COUNTERS)

    async def _complete(self, ask: _Ask) -> _Completions:
        answer = _completions.decode(await self._http.post("/v1/completions", ask))
        if answer.model != ask.model:
            raise EngineFailed(f"vLLM answered for {answer.model!r} where {ask.model!r} was asked.")
        return answer

    def _completion(self, choice: _Choice) -> Completion:
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else ()
        return self._http.completion(choice.token_ids, logprobs, choice.finish_reason)


def _ask(adapter: str, prompt: Sequence[int], n: int, sampling: Sampling) -> _Ask:
    return _Ask(
        model=adapter or vllm.BASE_NAME,
        prompt=prompt,
        n=n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
