"""A few rows of tokens that both halves score at every publish, and what each of them makes of these."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from bridge.protocol import Generate, Sampling, Score, pack_ids, unpack_ids, unpack_logprobs
from trainer_env.proof import comparisons
from trainer_env.runs.jsonl import write_atomically
from trainer_env.serving.server import Server

FILE = "probe.json"
ROWS = 2
ROW_TOKENS = 48
"""Short, for it is scored at every publish, and long enough for a verdict: some dozens of tokens."""
CACHED_TOKENS = 8

Rows = list[list[int]]
Scorer = Callable[[Rows], list[list[float]]]
"""The trainer's logprobs at temperature 1, under the weights as they are, of all tokens but each row's first. All rows
have one length."""


def chosen(folder: Path, sampled: Sequence[tuple[list[int], list[int]]], max_context: int) -> Rows:
    """The rows of a run: as they lie in its folder, else the ends of the first completions, of different prompts.

    sampled: (prompt, completion). They are kept, so that a resumed run has the same.
    """
    path = folder / FILE
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Rows)
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for prompt, completion in sampled:
        by_prompt.setdefault(tuple(prompt), completion)
    rows = [[*prompt, *completion] for prompt, completion in by_prompt.items()][:ROWS]
    room = (max_context - 2 * CACHED_TOKENS) // len(rows)  # Joined, they are a prompt.
    length = min(ROW_TOKENS, room, *map(len, rows))
    rows = [row[-length:] for row in rows]
    write_atomically(path, msgspec.json.encode(rows))
    return rows


class Probe:
    """The rows, with the base model's logprobs in both halves. All logprobs are in one list, row after row.

    base_model: a context in which the trainer computes without its adapter. timeout_s: for an answer of the server.
    """

    def __init__(self, rows: Rows, server: Server, scorer: Scorer, base_model: Any, timeout_s: float) -> None:
        self.rows = rows
        self._server = server
        self._scorer = scorer
        self._timeout_s = timeout_s
        scored = self.ask(0)
        with base_model:
            self.trainer_base = self.score()
        self.server_base = self.answer(scored)
        self.noise = comparisons.sigma(self.trainer_base, self.server_base)

    def score(self) -> list[float]:
        """The trainer's logprobs, under the weights as they are."""
        return [logprob for row in self._scorer(self.rows) for logprob in row]

    def ask(self, version: int) -> list[Future[Any]]:
        """Have the server score the rows under a version."""
        return [self._server.submit(self._question(row, version)) for row in self.rows]

    def answer(self, asked: Sequence[Future[Any]]) -> list[float]:
        """What it says. Raises its errors."""
        return joined(future.result().logprobs for future in asked)

    def over_a_cached_prefix(self, version: int) -> tuple[list[float], list[float]]:
        """Logprobs of tokens that are sampled under a version over what the base model has just put into the cache, and
        as they are scored, which bypasses the cache.
        """
        prefix = [token for row in self.rows for token in row]
        self._sample(prefix, 0, 1)
        completion = self._sample(prefix, version, CACHED_TOKENS).completions[0]
        ids = unpack_ids(completion.token_ids)
        scored = unpack_logprobs(self._server.ask(self._question([*prefix, *ids], version)).logprobs)
        return unpack_logprobs(completion.logprobs), scored[-len(ids) :]

    def _question(self, token_ids: list[int], version: int) -> Score:
        return Score(token_ids=pack_ids(token_ids), version=version, deadline_s=self._timeout_s)

    def _sample(self, prompt: list[int], version: int, tokens: int) -> Any:
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        ask = Generate(prompt=pack_ids(prompt), version=version, sampling=sampling, deadline_s=self._timeout_s)
        return self._server.ask(ask)


def joined(packed: Iterable[bytes]) -> list[float]:
    """Rows of packed logprobs as one list."""
    return [logprob for row in packed for logprob in unpack_logprobs(row)]
