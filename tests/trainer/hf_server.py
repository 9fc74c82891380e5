"""A server in this process: the bridge's blocking client as the trainer sees it, sampling with transformers and PEFT.

It serves what was published: the adapter is loaded from the bytes that arrive, into a model of its own, so the logprobs
it reports are those of the published version. The same question under the same version gets the same samples, whenever
it is asked, so that an interrupted run can be compared with one that was not.
"""

import hashlib
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils.save_and_load import set_peft_model_state_dict
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from bridge.protocol import (
    AdapterLoaded,
    Completion,
    Generate,
    Generated,
    Limits,
    PublishAdapter,
    Welcome,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)


class HFServer:
    """edit: changes a completion's (token ids, logprobs, finish reason) before it is sent."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: torch.dtype = torch.float32,
        max_context: int = 512,
        max_lora_rank: int = 64,
        edit: Callable[[list[int], list[float], str], tuple[list[int], list[float], str]] | None = None,
    ) -> None:
        self._path = model_path
        self._dtype = dtype
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
            case Generate():
                self.requests.append(request)
                self.replies.append(self._generate(request))
                future.set_result(self.replies[-1])
        return future

    @torch.inference_mode()
    def score(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Logprobs of a completion's tokens under the version that is loaded."""
        logits = self._model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(completion).unsqueeze(1))[:, 0].tolist()

    def load(self, version: int) -> None:
        """Go back to a version that was published."""
        set_peft_model_state_dict(self._model, load(self.adapters[version]))

    def _publish(self, request: PublishAdapter, payload: bytes) -> AdapterLoaded:
        assert request.version > self.version
        assert hashlib.sha256(payload).hexdigest() == request.sha256
        if not hasattr(self._model, "peft_config"):
            config = LoraConfig.from_peft_type(**request.adapter_config)
            # A real server draws its random numbers elsewhere.
            with torch.random.fork_rng():
                self._model = get_peft_model(self._model, config).eval()
        outcome = set_peft_model_state_dict(self._model, load(payload))
        assert not outcome.unexpected_keys
        self.version = request.version
        self._asked = 0
        self.adapters[request.version] = payload
        return AdapterLoaded(
            version=request.version, name=f"policy-{request.version}", nbytes=len(payload), spool_s=0.0, load_s=0.001
        )

    @torch.inference_mode()
    def _generate(self, request: Generate) -> Generated:
        self._asked += 1
        generator = torch.Generator().manual_seed(zlib.crc32(request.prompt) + 1000 * self.version + self._asked)
        prompt = torch.tensor([unpack_ids(request.prompt)]).repeat(request.n, 1)
        sampling, stop = request.sampling, set(request.sampling.stop_token_ids)
        rows: list[tuple[list[int], list[float], str]] = [([], [], "length") for _ in range(request.n)]
        ids, cache = prompt, None
        for _ in range(sampling.max_tokens):
            out = self._model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
            if sampling.temperature:
                ids = torch.multinomial(logprobs.exp(), 1, generator=generator)
            else:
                ids = logits.argmax(-1, keepdim=True)
            for row, (tokens, values, reason) in enumerate(rows):
                if reason != "stop":
                    token = int(ids[row])
                    tokens.append(token)
                    values.append(float(logprobs[row, token]))
                    rows[row] = (tokens, values, "stop" if token in stop else "length")
            if all(reason == "stop" for _, _, reason in rows):
                break
        if self._edit is not None:
            rows = [self._edit(*row) for row in rows]
        return Generated(
            version=self.version,
            completions=tuple(
                Completion(pack_ids(tokens), pack_logprobs(values), reason)  # type: ignore[arg-type]
                for tokens, values, reason in rows
            ),
        )
