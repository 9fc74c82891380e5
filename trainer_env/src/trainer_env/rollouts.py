"""Prompts → bridge → completions, as TRL's rollout_func. Completions stay the token ids that were sampled: text is for
people and reward functions only, because decoding and encoding again changes tokens.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from typing import Any, Protocol

from bridge.errors import ConfigError, EngineFailed, StaleVersion, SyncMismatch, Timeout
from bridge.protocol import Generate, Generated, Sampling, pack_ids, unpack_ids, unpack_logprobs
from trainer_env.config import TrainConfig
from trainer_env.server import Server

Prompt = str | list[dict[str, Any]]
"""Text, or a conversation for the chat template."""

GRACE_S = 1500.0
"""How much longer than a request's own deadline to wait for the client to report it. In that time a server that died is
started again, and asked anew."""


class Observer(Protocol):
    """Who works while TRL's completions are sampled, and looks at them before they are trained on."""

    def asking(self, step: int) -> None:
        """They are about to be asked for. step: optimizer steps taken, and the newest adapter version."""
        ...

    def asked(self) -> None:
        """They are being sampled."""
        ...

    def answered(self, step: int, sampled: Sequence[tuple[list[int], list[int]]]) -> None:
        """They are here: (prompt, completion) a row. What this raises ends the run."""
        ...


@dataclass(frozen=True)
class Sample:
    """One completion as it was sampled. trained: 0 for a token that nobody sampled, which must stay out of the loss.

    token_ids, logprobs (natural, at the sampling temperature) and trained have one entry a token, with the end token.
    """

    token_ids: list[int]
    logprobs: list[float]
    trained: list[int]
    finish_reason: str
    version: int


@dataclass(frozen=True)
class Batch:
    """What the last call for TRL brought. versions: one a row. seconds: waited for. tokens: sampled."""

    versions: list[int]
    seconds: float
    tokens: int


class Rollouts:
    """Samples completions from the server, under an adapter version that is new enough.

    max_staleness: optimizer steps that a completion's version may lie behind the last step that it trains, reuse of its
    batch counted. eos_token_ids: what ends a completion, as TRL sees it; default: the tokenizer's.
    Raises ConfigError when reuse alone exceeds the bound.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        config: TrainConfig,
        *,
        max_staleness: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._config = config
        self._max_staleness = max_staleness
        self._reuse = config.grpo.window - 1
        self._eos = tuple(eos_token_ids) or (tokenizer.eos_token_id,)
        self.calls = 0
        self.batches: list[Batch] = []
        """What the calls for TRL brought; whoever reports a step takes them out."""
        self.observer: Observer | None = None
        if self._reuse > max_staleness:
            raise ConfigError(
                f"A generation batch is used for {self._reuse + 1} optimizer steps, so its last one is {self._reuse} "
                f"behind the version that sampled it; the bound on staleness is {max_staleness}.",
                remedy=f"Set rollout.max_staleness to {self._reuse} or more, or reuse batches less.",
            )

    def __call__(self, prompts: list[Prompt], trainer: Any) -> dict[str, list[Any]]:
        """TRL's rollout_func: one completion a row. prompts: one a row, each repeated in a run for its group.

        Called once a generation batch, by every rank with its own rows; a run may be part of a group. Raises
        StaleVersion when the server sampled with a version that is too old, and the server's errors.
        """
        started = time.perf_counter()
        step, observer = trainer.state.global_step, self.observer
        oldest = max(0, step + self._reuse - self._max_staleness)
        grpo = self._config.grpo
        sampling = Sampling(
            temperature=grpo.temperature,
            max_tokens=grpo.max_completion_length,
            top_p=grpo.top_p,
            top_k=grpo.top_k,
            min_p=grpo.min_p,
            stop_token_ids=self._eos,
        )
        if observer:
            observer.asking(step)
        runs = [(self.encode(prompt), n) for prompt, n in _runs(prompts, grpo.num_generations)]
        groups = self._generate(
            [
                Generate(
                    prompt=pack_ids(prompt_ids),
                    n=n,
                    sampling=sampling,
                    min_version=oldest,
                    deadline_s=self._config.rollout.timeout_s,
                )
                for prompt_ids, n in runs
            ],
            meanwhile=observer.asked if observer else None,
        )
        rows = [sample for group in groups for sample in group]
        for sample in rows:
            if not oldest <= sample.version <= step:
                raise StaleVersion(
                    f"Optimizer step {step + 1} got a completion of adapter version {sample.version}; "
                    f"versions {oldest} to {step} are what it may train on.",
                    why="The server does not keep to min_version, or another trainer publishes to it.",
                )
        self.calls += 1
        self.batches.append(
            Batch(
                versions=[sample.version for sample in rows],
                seconds=time.perf_counter() - started,
                tokens=sum(sum(sample.trained) for sample in rows),
            )
        )
        all_prompt_ids = [prompt_ids for prompt_ids, n in runs for _ in range(n)]
        if observer:
            observer.answered(step, [(ids, row.token_ids) for ids, row in zip(all_prompt_ids, rows, strict=True)])
        result: dict[str, list[Any]] = {
            "prompt_ids": all_prompt_ids,
            "completion_ids": [sample.token_ids for sample in rows],
            "logprobs": [sample.logprobs for sample in rows],
            "finish_reason": [sample.finish_reason for sample in rows],
        }
        if any(0 in sample.trained for sample in rows):
            result["env_mask"] = [sample.trained for sample in rows]
        return result

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        min_version: int = 0,
        version: int = -1,
    ) -> list[list[Sample]]:
        """Complete each prompt n times, outside training; greedily unless a temperature is given.

        version: exactly this adapter version (0: the base model); -1: the newest, at least min_version.
        """
        sampling = Sampling(
            temperature=temperature,
            max_tokens=max_tokens or self._config.grpo.max_completion_length,
            stop_token_ids=self._eos,
        )
        return self._generate(
            [
                Generate(
                    prompt=pack_ids(self.encode(prompt, max_tokens)),
                    n=n,
                    sampling=sampling,
                    min_version=min_version,
                    version=version,
                    deadline_s=self._config.rollout.timeout_s,
                )
                for prompt in prompts
            ]
        )

    def decode(self, sample: Sample) -> str:
        """The completion as text, without special tokens."""
        return self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """A prompt's token ids: through the chat template if it is a conversation.

        Raises ConfigError, quoting the prompt, when it leaves no room for a completion of max_tokens.
        """
        if isinstance(prompt, str):
            ids: list[int] = self._tokenizer(prompt)["input_ids"]
        else:
            ids = self._apply_chat_template(prompt)
        context = min(self._server.welcome.limits.max_context, self._config.model.max_seq_length)
        completion = max_tokens or self._config.grpo.max_completion_length
        if not ids:
            raise ConfigError("A prompt has no tokens.", remedy="Leave empty prompts out of the data.")
        if len(ids) + completion > context:
            raise ConfigError(
                f"A prompt of {len(ids)} tokens and a completion of up to {completion} do not fit the context of "
                f"{context} tokens. The prompt begins: {_excerpt(prompt)}",
                remedy="Leave such samples out of the data, raise model.max_seq_length and the server's limit with it, "
                "or lower grpo.max_completion_length.",
            )
        return ids

    def _apply_chat_template(self, conversation: list[dict[str, Any]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                "The data holds conversations, and this model's tokenizer has no chat template.",
                remedy="Set data.chat = false to send plain text, or train an instruction-tuned model.",
            )
        prefilled = conversation[-1]["role"] == "assistant"
        return self._tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            tokenize=True,
            return_dict=False,
            **self._config.data.chat_template_kwargs,
        )

    def _generate(self, requests: list[Generate], meanwhile: Callable[[], None] | None = None) -> list[list[Sample]]:
        """Ask for all groups at once and wait for all. One that fails ends the others. meanwhile: called first."""
        futures = [self._server.submit(request) for request in requests]
        try:
            if meanwhile:
                meanwhile()
            wait(futures, timeout=self._config.rollout.timeout_s + GRACE_S, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
            unanswered = sum(not future.done() for future in futures)
            if unanswered:
                raise Timeout(
                    f"{unanswered} of {len(futures)} requests for completions have no answer after "
                    f"{self._config.rollout.timeout_s:g} s.",
                    log_path=self._server.welcome.log_path,
                    remedy="Raise rollout.timeout_s if the server is only slow.",
                )
            return [self._samples(request, future.result()) for request, future in zip(requests, futures, strict=True)]
        finally:
            for future in futures:
                future.cancel()

    def _samples(self, request: Generate, reply: Generated) -> list[Sample]:
        """A reply's completions, checked: what TRL trains on must be complete."""
        if len(reply.completions) != request.n:
            raise SyncMismatch(f"{request.n} completions were asked for, and {len(reply.completions)} came back.")
        samples = []
        for completion in reply.completions:
            ids, logprobs = unpack_ids(completion.token_ids), unpack_logprobs(completion.logprobs)
            if len(ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
                raise SyncMismatch(
                    f"A completion of {len(ids)} tokens came with {len(logprobs)} logprobs, or with some that are no "
                    "numbers.",
                    why="The engine does not report the logprob of each token that it sampled.",
                    log_path=self._server.welcome.log_path,
                )
            if completion.finish_reason == "abort":
                raise EngineFailed(
                    "The engine broke a completion off.",
                    why="It was restarted or told to abort while it sampled.",
                    log_path=self._server.welcome.log_path,
                )
            trained = [1] * len(ids)
            if not ids or (completion.finish_reason == "stop" and ids[-1] not in self._eos):
                # TRL fails on an empty row, and takes one without an end token for truncated. Nobody sampled this
                # token, so it is kept out of the loss.
                ids, logprobs, trained = [*ids, self._eos[0]], [*logprobs, 0.0], [*trained, 0]
            samples.append(Sample(ids, logprobs, trained, completion.finish_reason, reply.version))
        return samples


def _runs(prompts: Sequence[Prompt], longest: int) -> Iterator[tuple[Prompt, int]]:
    """Runs of equal neighbours as (prompt, length), none above `longest`: a group is one request to the server."""
    start = 0
    for index in range(1, len(prompts) + 1):
        if index == len(prompts) or prompts[index] != prompts[start] or index - start == longest:
            yield prompts[start], index - start
            start = index


def _excerpt(prompt: Prompt, length: int = 300) -> str:
    text = prompt if isinstance(prompt, str) else " | ".join(str(message.get("content", "")) for message in prompt)
    return repr(text if len(text) <= length else text[:length] + "…")
