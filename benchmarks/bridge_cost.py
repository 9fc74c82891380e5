"""Tokens a second through Tandem, divided by those of the same engine that is asked directly.

    .venvs/trainer/bin/python benchmarks/bridge_cost.py vllm|sglang [--model FOLDER] [--sequences 1,64] [--out FILE]

Needs the trainer environment's Python. A server is started as a run starts its own. The same requests, all at once, go
by turns through the client that a run asks through, and over the engine's own HTTP routes: the same prompts, samples a
prompt, sampling parameters, logprobs and numbers of tokens, and token ids and logprobs as lists on either side. Turns
follow one another, so that drift hits both. The factor is the median of those of the rounds.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from rich.table import Table

import direct
import policy
from bridge import protocol as p
from rig import DEADLINE_S, Report, Rig, numbers, parser, rig, say
from trainer_env.publishing.publisher import Publisher

VERSION = 1
WARM_UP_TOKENS = 8
"""Enough to fill the prefix cache on behalf of both, and to open connections."""

Prompts = list[list[int]]
Lengths = list[tuple[int, int]]
"""Token ids and logprobs of each completion."""


class Asked:
    """Two ways to have the same engine complete the same prompts. run: runs a coroutine."""

    def __init__(self, it: Rig, engine: direct.Direct, run: direct.Run, adapter: str) -> None:
        self._client = it.client
        self._engine = engine
        self._run = run
        self._adapter = adapter
        self._version = VERSION if adapter else 0

    def through_tandem(self, prompts: Prompts, n: int, sampling: p.Sampling) -> Lengths:
        """Through the bridge, as rollouts are."""
        futures = [
            self._client.submit(
                p.Generate(
                    prompt=p.pack_ids(prompt), n=n, sampling=sampling, version=self._version, deadline_s=DEADLINE_S
                )
            )
            for prompt in prompts
        ]
        completions = [completion for future in futures for completion in future.result().completions]
        return [(len(p.unpack_ids(one.token_ids)), len(p.unpack_logprobs(one.logprobs))) for one in completions]

    def over_http(self, prompts: Prompts, n: int, sampling: p.Sampling) -> Lengths:
        """Of the engine itself."""
        groups = self._run(self._all(prompts, n, sampling))
        return [(len(one.token_ids), len(one.logprobs)) for group in groups for one in group]

    async def _all(self, prompts: Prompts, n: int, sampling: p.Sampling) -> list[list[direct.Completion]]:
        return await asyncio.gather(*(self._engine.generate(self._adapter, prompt, n, sampling) for prompt in prompts))


def rate(ask: Callable[[Prompts, int, p.Sampling], Lengths], prompts: Prompts, n: int, sampling: p.Sampling) -> float:
    """Generated tokens a second. Raises RuntimeError unless all that was asked for came."""
    started = time.perf_counter()
    lengths = ask(prompts, n, sampling)
    seconds = time.perf_counter() - started
    wanted = [(sampling.max_tokens, sampling.max_tokens)] * (len(prompts) * n)
    if lengths != wanted:
        raise RuntimeError(
            f"{len(wanted)} times {sampling.max_tokens} tokens were asked for, {len(lengths)} of {set(lengths)} came"
        )
    return len(wanted) * sampling.max_tokens / seconds


def compare(asked: Asked, prompts: Prompts, n: int, options: argparse.Namespace) -> dict[str, Any]:
    """One number of sequences: rounds of both, after a short one of each."""
    sampling = p.Sampling(max_tokens=options.max_tokens, ignore_eos=True)
    short = msgspec.structs.replace(sampling, max_tokens=min(WARM_UP_TOKENS, options.max_tokens))
    for ask in (asked.through_tandem, asked.over_http):
        rate(ask, prompts, n, short)
    rounds = [
        (rate(asked.through_tandem, prompts, n, sampling), rate(asked.over_http, prompts, n, sampling))
        for _ in range(options.rounds)
    ]
    factors = [tandem / other for tandem, other in rounds]
    return {
        "sequences": len(prompts) * n,
        "n": n,
        "tandem_tokens_per_s": round(statistics.median(tandem for tandem, _ in rounds), 1),
        "direct_tokens_per_s": round(statistics.median(other for _, other in rounds), 1),
        "factor": round(statistics.median(factors), 3),
        "lowest_factor": round(min(factors), 3),
        "rounds": [[round(value, 1) for value in one] for one in rounds],
    }


def table(found: list[dict[str, Any]]) -> Table:
    """A row for each number of sequences."""
    drawn = Table(title="Tokens a second through Tandem and asked directly of the same engine")
    drawn.add_column("policy")
    for name in ("sequences", "n", "Tandem", "direct", "factor", "lowest"):
        drawn.add_column(name, justify="right")
    for one in found:
        rates = [f"{one[name]:,.0f}" for name in ("tandem_tokens_per_s", "direct_tokens_per_s")]
        factors = [f"{one[name]:.3f}" for name in ("factor", "lowest_factor")]
        drawn.add_row(one["policy"], str(one["sequences"]), str(one["n"]), *rates, *factors)
    return drawn


def name_of_adapter(it: Rig, rank: int) -> str:
    """Publish an adapter of moved weights; what the engine calls it."""
    model = policy.make(it.model, rank, "cpu")
    policy.step(model)
    return Publisher(it.client, timeout_s=DEADLINE_S).publish(VERSION, model).name


def main() -> int:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--sequences", type=numbers, default=[1, 64, 512, 2048], help="at once (1,64,512,2048)")
    arguments.add_argument("--n", type=numbers, default=[1, 8], help="samples of a prompt, where they divide (1,8)")
    arguments.add_argument("--max-tokens", type=int, default=128, help="of a completion, no fewer (%(default)s)")
    arguments.add_argument("--prompt-tokens", type=int, default=96, help="of a prompt (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=3, help="of both, by turns (%(default)s)")
    arguments.add_argument("--rank", type=int, default=16, help="of the adapter (%(default)s)")
    arguments.add_argument("--policies", choices=["base", "adapter", "both"], default="both", help="(%(default)s)")
    options = arguments.parse_args()
    policies = ["base", "adapter"] if options.policies == "both" else [options.policies]
    cells = [(many, n) for many in options.sequences for n in options.n if many % n == 0]
    context = options.prompt_tokens + options.max_tokens
    with (
        rig(options, lora__r=options.rank, model__max_seq_length=context) as it,
        direct.connected(options.backend, it.listening) as (engine, run),
    ):
        report = Report(options, it)
        for chosen in policies:
            adapter = name_of_adapter(it, options.rank) if chosen == "adapter" else ""
            asked, rng = Asked(it, engine, run, adapter), random.Random(0)
            for many, n in cells:
                say(f"{chosen}, {many} sequences, n = {n}")
                prompts = [rng.choices(it.token_ids, k=options.prompt_tokens) for _ in range(many // n)]
                report.add({"policy": chosen, **compare(asked, prompts, n, options)})
        report.show(table(report.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
