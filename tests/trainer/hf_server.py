"""A server in this process: the bridge's blocking client as the trainer sees it, sampling with transformers and PEFT.

It serves what was published: the adapter is loaded from the bytes that arrive, into a model of its own, so the logprobs
it reports are those of the published version. The same question under the same version gets the same samples, whenever
it is asked, so that an interrupted run can be compared with one that was not. It can be told to go wrong.
"""

import contextlib
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from bridge.digest import digest
from bridge.protocol import (
    AdapterLoaded,
    Canary,
    CanaryScored,
    Completion,
    Generate,
    Generated,
    Limits,
    PublishAdapter,
    Sampling,
    Score,
    Scored,
    Welcome,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)


class HFServer:
    """edit: changes a completion's (token ids, logprobs, finish reason) before it is sent. tamper: changes an adapter's
    tensors, by name, on their way into the model. stale: a prompt is read from the base model's cache, whatever version
    samples. tempered: False for logprobs from before the temperature. Asked for an exact version, nothing is recorded.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype = torch.float32,
        max_context: int = 512,
        max_lora_rank: int = 64,
        edit: Callable[[list[int], list[float], str], tuple[list[int], list[float], str]] | None = None,
        tamper: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda tensors: tensors,
        stale: bool = False,
        tempered: bool = True,
    ) -> None:
        self._tamper = tamper
        self._stale = stale
        self._tempered = tempered
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).eval()
        self._edit = edit
        self._asked = 0
        self.version = 0
        self.adapters: dict[int, bytes] = {}
        self.requests: list[Generate] = []
        self.replies: list[Generated] = []
        limits = Limits(max_context=max_context, max_lora_rank=max_lora_rank, adapter_slots=2, max_in_flight=64)
        self.welcome = Welcome(
            protocol=1,
            server_uuid="here",
            engine="transformers",
            engine_version="",
            model=model_path,
            capabilities=(),
            limits=limits,
            version=0,
            epoch=1,
            lease_s=0.0,
        )

    def ask(self, request: Any, buffer: bytes | memoryview | None = None) -> Any:
        return self.submit(request, buffer).result()

    def submit(self, request: Any, buffer: bytes | memoryview | None = None) -> Future[Any]:
        future: Future[Any] = Future()
        match request:
            case PublishAdapter():
                assert buffer is not None
                future.set_result(self._publish(request, bytes(buffer)))
            case Canary():
                assert buffer is not None
                future.set_result(self._answer_canary(request, bytes(buffer)))
            case Score():
                ids = unpack_ids(request.token_ids)
                with self._under(request.version):
                    found = self.score(ids[:1], ids[1:])
                future.set_result(Scored(version=request.version, logprobs=pack_logprobs(found)))
            case Generate(version=-1):
                self.requests.append(request)
                self._asked += 1
                with self._under(self.version):
                    self.replies.append(self._generate(request, self.version))
                future.set_result(self.replies[-1])
            case Generate():
                with self._under(request.version):
                    future.set_result(self._generate(request, request.version))
        return future

    @torch.inference_mode()
    def score(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Logprobs of a completion's tokens under the version that is loaded."""
        logits = self._model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(completion).unsqueeze(1))[:, 0].tolist()

    def load(self, version: int) -> None:
        """Go back to a version that was published."""
        self._put(self.adapters[version])

    def _publish(self, request: PublishAdapter, payload: bytes) -> AdapterLoaded:
        assert request.version > self.version
        assert digest(payload) == request.digest
        self._wrap(request.adapter_config)
        self.version = request.version
        self._asked = 0
        self.adapters[request.version] = payload
        return AdapterLoaded(
            version=request.version, name=f"policy-{request.version}", nbytes=len(payload), spool_s=0.0, load_s=0.001
        )

    def _wrap(self, adapter_config: dict[str, object]) -> None:
        if not hasattr(self._model, "peft_config"):
            config = LoraConfig.from_peft_type(**adapter_config | {"base_model_name_or_path": None})
            # A real server draws its random numbers elsewhere.
            with torch.random.fork_rng():
                self._model = get_peft_model(self._model, config).eval()

    def _put(self, payload: bytes) -> None:
        outcome = set_peft_model_state_dict(self._model, self._tamper(load(payload)))
        assert not outcome.unexpected_keys

    def _base(self) -> contextlib.AbstractContextManager[Any]:
        return self._model.disable_adapter() if hasattr(self._model, "peft_config") else contextlib.nullcontext()

    @contextlib.contextmanager
    def _under(self, version: int) -> Iterator[None]:
        """Compute as one version: 0 is the base model."""
        if version == 0:
            with self._base():
                yield
        else:
            self.load(version)
            yield

    def _answer_canary(self, request: Canary, payload: bytes) -> CanaryScored:
        assert digest(payload) == request.digest
        rows = [unpack_ids(row) for row in request.rows]
        with self._base():
            base = [pack_logprobs(self.score(row[:1], row[1:])) for row in rows]
        self._wrap(request.adapter_config)
        self._put(payload)
        adapted = [pack_logprobs(self.score(row[:1], row[1:])) for row in rows]
        prefix = [token for row in rows for token in row]
        ask = Generate(prompt=pack_ids(prefix), version=1, sampling=Sampling(max_tokens=8, ignore_eos=True))
        completion = self._generate(ask, 1).completions[0]
        rescored = pack_logprobs(self.score(prefix, unpack_ids(completion.token_ids)))
        return CanaryScored(
            base=tuple(base), adapted=tuple(adapted), sampled=completion.logprobs, rescored=rescored, load_s=0.0
        )

    @torch.inference_mode()
    def _generate(self, request: Generate, version: int) -> Generated:
        generator = torch.Generator().manual_seed(zlib.crc32(request.prompt) + 1000 * self.version + self._asked)
        prompt = torch.tensor([unpack_ids(request.prompt)]).repeat(request.n, 1)
        sampling, stop = request.sampling, set(request.sampling.stop_token_ids)
        rows: list[tuple[list[int], list[float], str]] = [([], [], "length") for _ in range(request.n)]
        ids, cache = prompt, None
        if self._stale and version:
            with self._base():
                cache = self._model(input_ids=prompt[:, :-1], use_cache=True).past_key_values
            ids = prompt[:, -1:]
        for _ in range(sampling.max_tokens):
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
            raw = torch.log_softmax(logits, dim=-1)
            if sampling.temperature:
                ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
            else:
                ids = logits.argmax(-1, keepdim=True)
            for row, (tokens, values, reason) in enumerate(rows):
                if reason != "stop":
                    token = int(ids[row])
                    tokens.append(token)
                    values.append(float((logprobs if self._tempered else raw)[row, token]))
                    rows[row] = (tokens, values, "stop" if token in stop else "length")
            if all(reason == "stop" for _, _, reason in rows):
                break
        if self._edit is not None and request.version == -1:
            rows = [self._edit(*row) for row in rows]
        return Generated(
            version=version,
            completions=tuple(
                Completion(pack_ids(tokens), pack_logprobs(values), reason)  # type: ignore[arg-type]
                for tokens, values, reason in rows
            ),
        )
