"""Prompts → bridge → completions. They stay the token ids that were sampled: text is for people and reward functions
only, because decoding and encoding again changes tokens.
"""

import math
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

from bridge.errors import EngineFailed, SyncMismatch, Timeout
from bridge.protocol import Generate, Generated, Sampling, pack_ids, unpack_ids, unpack_logprobs
from trainer_env.config import TrainConfig
from trainer_env.sampling.prompts import Prompt, encode, too_long
from trainer_env.serving import MAX_RESTARTS
from trainer_env.serving.server import Server
from trainer_env.serving.turns import Turns

GRACE_S = 300.0
"""How much longer to wait than the client itself does, for what it reports to come first."""


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


class Asked:
    """Groups that the server was asked for at once. One that fails ends the others."""

    def __init__(self, server: Server, requests: Sequence[Generate]) -> None:
        self.requests = requests
        self.asked_at = time.perf_counter()
        self.answered_at = self.asked_at
        """When the last answer came, by time.perf_counter."""
        self._allowed = max((request.deadline_s for request in requests), default=0.0)
        self._restart_s = server.welcome.restart_s
        self._log_path = server.welcome.log_path
        self._futures: list[Future[Generated]] = []
        try:
            for request in requests:
                future = server.submit(request)
                self._futures.append(future)
                future.add_done_callback(self._note_answer)
        except BaseException:
            self.give_up()
            raise

    def answers(self) -> list[Generated]:
        """Wait for all. Raises the first error, and Timeout."""
        to_come = not all(future.done() for future in self._futures)
        try:
            # The time in which engines are started does not count; and a server that dies is replaced, and asked anew.
            longest_s = (1 + MAX_RESTARTS) * (self._allowed + 2 * self._restart_s) + GRACE_S
            wait(self._futures, timeout=longest_s, return_when=FIRST_EXCEPTION)
            for future in self._futures:
                if future.done():
                    future.result()
            unanswered = sum(not future.done() for future in self._futures)
            if unanswered:
                raise Timeout(
                    f"{unanswered} of {len(self._futures)} requests for completions have no answer after "
                    f"{self._allowed:g} s.",
                    log_path=self._log_path,
                    remedy="Raise rollout.timeout_s if the server is only slow.",
                )
            found = [future.result() for future in self._futures]
            if to_come:  # Whoever waits may hear of the last answer before it is noted.
                self.answered_at = time.perf_counter()
            return found
        finally:
            self.give_up()

    def give_up(self) -> None:
        """The server need not answer what is still open."""
        for future in self._futures:
            future.cancel()

    def _note_answer(self, _: Future[Generated]) -> None:
        self.answered_at = time.perf_counter()


class Sampler:
    """Asks the server for completions of prompts.

    eos_token_ids: what ends a completion; default: the tokenizer's. turns: when the server may compute; default:
    always.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Any,
        config: TrainConfig,
        *,
        eos_token_ids: Sequence[int] = (),
        turns: Turns | None = None,
    ) -> None:
        self.turns = turns or Turns()
        self.eos_token_ids = tuple(eos_token_ids) or (tokenizer.eos_token_id,)
        self._server = server
        self._tokenizer = tokenizer
        self._config = config

    def ask(self, requests: Sequence[Generate]) -> Asked:
        """Have the server answer all of them; `samples` waits for that."""
        return Asked(self._server, requests)

    def samples(self, asked: Asked) -> list[list[Sample]]:
        """The completions of each group, checked. Raises what the server answers, Timeout, SyncMismatch."""
        return [self._checked(request, reply) for request, reply in zip(asked.requests, asked.answers(), strict=True)]

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

        version: exactly this adapter version (0: the base model); -1: the newest, at least min_version. They are asked
        for at once, and rollout.timeout_s holds for each generation batch that they would fill.
        """
        batches = math.ceil(len(prompts) * n / self._config.grpo.scored_at_once)
        sampling = Sampling(
            temperature=temperature,
            max_tokens=max_tokens or self._config.grpo.max_completion_length,
            stop_token_ids=self.eos_token_ids,
        )
        requests = [
            Generate(
                prompt=pack_ids(self.encode(prompt, max_tokens)),
                n=n,
                sampling=sampling,
                min_version=min_version,
                version=version,
                deadline_s=self._config.rollout.timeout_s * batches,
            )
            for prompt in prompts
        ]
        with self.turns.servers():
            return self.samples(self.ask(requests))

    def decode(self, sample: Sample) -> str:
        """The completion as text, without special tokens."""
        return self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> list[int]:
        """A prompt's token ids: through the chat template if it is a conversation.

        Raises ConfigError, quoting the prompt, when it leaves no room for a completion of max_tokens.
        """
        ids = encode(prompt, self._tokenizer, self._config.data)
        context = min(self._server.welcome.limits.max_context, self._config.model.max_seq_length)
        completion = max_tokens or self._config.grpo.max_completion_length
        if len(ids) + completion > context:
            raise too_long(prompt, len(ids), completion=completion, context=context)
        return ids

    def _checked(self, request: Generate, reply: Generated) -> list[Sample]:
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
            if not ids or (completion.finish_reason == "stop" and ids[-1] not in self.eos_token_ids):
                # TRL fails on an empty row, and takes one without an end token for truncated. Nobody sampled this
                # token, so it is kept out of the loss.
                ids, logprobs, trained = [*ids, self.eos_token_ids[0]], [*logprobs, 0.0], [*trained, 0]
            samples.append(Sample(ids, logprobs, trained, completion.finish_reason, reply.version))
        return samples
