"""Measure one backend through the whole server half: `python tests/engines/bench.py vllm|sglang MODEL [KEY=VALUE…]`.

Run with the Python of the dev environment, on a machine that is otherwise idle. MODEL is a folder. KEY=VALUE: as for
`tandem-server --set`. Prints one JSON object:

    start_s        from starting tandem-server until it has answered a generation
    rss_gib        resident memory of the engine's processes, after the load
    tokens_per_s   {sequences at once: generated tokens a second}, of the base model and under an adapter
    load_ms        median of 10 adapters of rank 16, published one after the other
    publish_ms     the same, with the way over the bridge and the spool
    first_ms       a first token under an adapter that was just loaded
    stop_s         from SIGTERM until nobody is left
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

import lora_files
from bridge import protocol as p
from served import ROOT, generate, served

MAX_TOKENS = 64
SEQUENCES = (1, 8, 16, 64)
GROUP = 8
PUBLISHES = 10


async def throughput(client, sequences: int, version: int) -> float:
    """Generated tokens a second: groups of up to GROUP sequences, all asked at once."""
    groups = [min(GROUP, sequences)] * max(1, sequences // GROUP)
    asks = [
        generate([5 + i, 6, 7, 8], n=n, version=version, max_tokens=MAX_TOKENS, ignore_eos=True, deadline_s=600)
        for i, n in enumerate(groups)
    ]
    started = time.monotonic()
    await asyncio.gather(*(client.ask(ask) for ask in asks))
    return sum(groups) * MAX_TOKENS / (time.monotonic() - started)


async def measure(backend: str, model: Path, settings: list[str]) -> dict:
    """Everything that the docstring names."""
    found: dict = {"backend": backend, "model": model.name}
    venvs = Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")
    program = [str(venvs / f"server-{backend}" / "bin" / "python"), "-m", "server_env.cli"]
    folder = Path(tempfile.mkdtemp(prefix="tandem-bench-"))
    section = {"backend": backend, "max_lora_rank": 16, "context_length": 512}
    extra = tuple(word for setting in settings for word in ("--set", setting))
    started = time.monotonic()
    async with served(folder, model, fake=False, program=program, arguments=extra, server=section, wait=False) as it:
        await it.ready(900)
        found["start_s"] = round(time.monotonic() - started, 1)
        client = await it.client("bench")
        found["versions"] = f"{client.welcome.engine} {client.welcome.engine_version}"
        await client.ask(generate([5, 6, 7, 8], n=8, max_tokens=32, ignore_eos=True, deadline_s=600))
        found["tokens_per_s"] = {n: round(await throughput(client, n, 0)) for n in SEQUENCES}
        loads, publishes, firsts = [], [], []
        adapters = [lora_files.make(model, seed, rank=16, scale=0.02) for seed in range(PUBLISHES)]
        for version, adapter in enumerate(adapters, 1):
            before = time.monotonic()
            loads.append((await client.ask(adapter.publish(version, deadline_s=600), adapter.data)).load_s)
            after = time.monotonic()
            await client.ask(generate([5, 6, 7, 8], max_tokens=1, ignore_eos=True, deadline_s=600))
            publishes.append(after - before)
            firsts.append(time.monotonic() - after)
        for name, values in (("load_ms", loads), ("publish_ms", publishes), ("first_ms", firsts)):
            found[name] = round(1000 * statistics.median(values), 1)
        found["adapter_mb"] = round(len(adapters[0].data) / 1e6, 1)
        found["tokens_per_s_lora"] = {n: round(await throughput(client, n, PUBLISHES)) for n in SEQUENCES}
        family = psutil.Process((await client.ask(p.Status())).engine_pid)
        rss = sum(q.memory_info().rss for q in (family, *family.children(recursive=True)))
        found["rss_gib"] = round(rss / 2**30, 2)
        stopping = time.monotonic()
    found["stop_s"] = round(time.monotonic() - stopping, 1)
    return found


def main() -> None:
    """Print the figures."""
    backend, model, *settings = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(backend, Path(model), settings))))


if __name__ == "__main__":
    main()
