"""Keep an engine busy behind the server half for long, and kill it now and then.

    .venvs/dev/bin/python benchmarks/soak.py vllm|sglang [options]

A tiny random model on CPU is published to and asked through the real bridge client, while a process of the engine is
killed at moments that the seed decides. `fake` in place of an engine is for trying this program. Prints a table of
memory and open descriptors (see samples.py).

Exit code 1 when a request was lost, answered twice or answered wrongly, when a process or a file was left behind, or
when tandem-server has grown by more than `--growth-mib`, counted from the first tenth of the requests on.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil

import lora_files
from bridge import guard
from bridge import protocol as p
from bridge.errors import BridgeError
from samples import Sample, held, resident, table
from served import ROOT, Client, Served, generate, served, tiny_model

POLL_S = 0.05
HOPELESS = 20
"""Problems after which nothing more is asked."""

AHEAD = 2
"""Versions that the requests may be ahead of the publishes."""

SPARE_DESCRIPTORS, VOCABULARY = 16, 512


@dataclass
class Soak:
    """One soak: what was asked, what came back, what is wrong."""

    options: argparse.Namespace
    server: Served
    client: Client
    model: Path
    samples: list[Sample] = field(default_factory=list)
    kills: list[dict[str, Any]] = field(default_factory=list)
    loads_ms: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    answers: Counter[bytes] = field(default_factory=Counter)
    asked: int = 0
    finished: int = 0
    tokens: int = 0
    announced: int = 0
    """The newest version whose publish has begun."""
    serving: int = 0
    """The newest version whose publish was answered."""
    broken: bool = False

    @property
    def hopeless(self) -> bool:
        """Whether to give up."""
        return self.broken or len(self.problems) >= HOPELESS

    def due(self, requests: int) -> int:
        """The version that should serve after so many requests: publishes are spread evenly over them."""
        return requests * (self.options.publishes + 1) // self.options.requests

    def settled(self) -> list[Sample]:
        """The samples that say something about growth."""
        return [s for s in self.samples if s.requests >= self.options.requests / 10] or self.samples[-1:]

    async def run(self) -> None:
        """All of it; what went wrong is in problems afterwards."""
        self._count_answers()
        await self._sample()
        workers = [self._ask_on(random.Random(f"{self.options.seed}/{i}")) for i in range(self.options.concurrency)]
        await asyncio.gather(*workers, self._whole(self._publish_all()), self._whole(self._kill_all()))
        await self._sample()
        await self._whole(self._compare())

    async def _whole(self, part: Coroutine[Any, Any, None]) -> None:
        """Await a part without which the rest is worth nothing."""
        try:
            await part
        except (BridgeError, TimeoutError) as error:
            self.problems.append(f"given up: {type(error).__name__}: {error}")
            self.broken = True

    def _count_answers(self) -> None:
        """See every answer that arrives, also those that the client throws away because it has one already."""
        channel = self.client._data
        take_in = channel._take_in

        def counted(request_id: bytes, header: bytes) -> None:
            self.answers[request_id] += 1
            take_in(request_id, header)

        channel._take_in = counted

    async def _ask_on(self, rng: random.Random) -> None:
        while self.asked < self.options.requests and not self.hopeless:
            self.asked += 1
            least = self.due(self.asked) - AHEAD
            await self._until(lambda least=least: self.serving >= least)
            await self._ask(rng)
            self.finished += 1
            if self.finished % self.options.every == 0:
                await self._sample()

    async def _ask(self, rng: random.Random) -> None:
        """One request, checked. Some ask for a version that is only being published."""
        n, tokens = rng.randint(1, 2), rng.randint(1, self.options.tokens)
        prompt = [rng.randrange(5, VOCABULARY) for _ in range(rng.randint(2, 24))]
        least = self.announced if rng.random() < 0.2 else self.serving
        request = generate(
            prompt, n=n, max_tokens=tokens, min_version=least, ignore_eos=True, deadline_s=self.options.deadline_s
        )
        try:
            answer = await self.client.ask(request)
        except BridgeError as error:
            self.problems.append(f"a request was lost: {type(error).__name__}: {error.what}")
            return
        lengths = [len(p.unpack_ids(c.token_ids)) for c in answer.completions]
        self.tokens += sum(lengths)
        if answer.version < least:
            self.problems.append(f"version {answer.version} answered, {least} was the least that was asked for")
        if lengths != [tokens] * n or [len(c.logprobs) // 4 for c in answer.completions] != lengths:
            self.problems.append(f"{n} times {tokens} tokens were asked for, {lengths} came")

    async def _publish_all(self) -> None:
        for version in range(1, self.options.publishes + 1):
            await self._until(lambda version=version: self.due(self.asked) >= version)
            if self.hopeless:
                return
            adapter = await asyncio.to_thread(lora_files.make, self.model, version)
            self.announced = version
            loaded = await self.client.ask(adapter.publish(version, self.options.deadline_s), adapter.data)
            self.serving = loaded.version
            self.loads_ms.append(1000 * loaded.load_s)

    async def _kill_all(self) -> None:
        rng = random.Random(f"{self.options.seed}/kills")
        moments = range(self.options.requests // 20, self.options.requests * 19 // 20)
        for moment in sorted(rng.sample(moments, self.options.kills)):
            await self._until(lambda moment=moment: self.finished >= moment)
            await asyncio.sleep(rng.uniform(0, 0.2))
            if not self.hopeless:
                await self._kill(rng)

    async def _kill(self, rng: random.Random) -> None:
        """Kill a large process of the engine, and wait until another engine is ready and has answered."""
        before = await self.client.ask(p.Status())
        if not before.engine_pid:
            raise TimeoutError("there is no engine that could be killed")
        everybody = guard.processes()
        family = [pid for pid in (before.engine_pid, *guard.descendants(before.engine_pid)) if pid in everybody]
        victim, began = rng.choice(sorted(family, key=resident)[-2:]), time.monotonic()
        guard.send([victim], signal.SIGKILL, self.server.process.pid)
        status, finished = before, self.finished
        while not (status.restarts > before.restarts and await self._ready()):
            if time.monotonic() - began > self.options.deadline_s:
                raise TimeoutError(f"no engine again within {self.options.deadline_s:g} s of a kill")
            await asyncio.sleep(POLL_S)
            status = await self.client.ask(p.Status())
        self.kills.append({"requests": finished, "pid": victim, "back_s": round(time.monotonic() - began, 1)})
        now = guard.processes()
        if left := [pid for pid in family if pid in now and now[pid].started == everybody[pid].started]:
            self.problems.append(f"processes {left} outlived their engine")
        await self._until(lambda: self.finished > finished or self.asked >= self.options.requests)

    async def _ready(self) -> bool:
        return (await self.client.ask(p.Ping())).engine == "ready"

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self.hopeless:  # noqa: ASYNC110 (many conditions, none of which has an event)
            await asyncio.sleep(POLL_S)

    async def _sample(self) -> None:
        try:
            status, ready = await self.client.ask(p.Status()), await self._ready()
        except BridgeError as error:
            self.problems.append(f"the server does not say how it is: {error.what}")
            return
        engine = (None, None)
        if ready and status.engine_pid:
            with contextlib.suppress(psutil.Error, OSError):  # It has just been killed.
                engine = held([status.engine_pid, *guard.descendants(status.engine_pid)])
        scratch = Path(self.client.connection.data.removeprefix("ipc://")).parent
        files = [path for path in scratch.rglob("*") if not path.is_dir()]
        spooled = [path for path in (*files, *self.server.run_dir.glob("spool/*/*")) if "spool" in path.parts]
        server = held([self.server.process.pid])
        self.samples.append(Sample(self.finished, status.restarts + 1, *server, *engine, len(files), len(spooled)))

    async def _compare(self) -> None:
        """The totals, with nothing in flight."""
        doubled = sum(times > 1 for times in self.answers.values())
        if doubled or len(self.answers) != self.asked:
            self.problems.append(f"{self.asked} requests, {len(self.answers)} answered, {doubled} more than once")
        status = await self.client.ask(p.Status())
        if (status.requests, status.generated_tokens) != (self.asked, self.tokens):
            self.problems.append(
                f"the server counts {status.requests} requests and {status.generated_tokens} tokens, "
                f"the client {self.asked} and {self.tokens}"
            )
        if status.in_use or status.dropped_frames or status.restarts != len(self.kills):
            self.problems.append(
                f"{len(self.kills)} kills and nothing in flight, but {status.restarts} restarts, "
                f"versions {status.in_use} in use, {status.dropped_frames} malformed messages"
            )
        first, last = self.settled()[0], self.samples[-1]
        if (grown := (last.server_kib - first.server_kib) / 1024) > self.options.growth_mib:
            self.problems.append(f"tandem-server has grown by {grown:.1f} MiB")
        if last.server_fds > self.samples[0].server_fds + self.options.concurrency + SPARE_DESCRIPTORS:
            self.problems.append(f"tandem-server holds {last.server_fds} files, at first {self.samples[0].server_fds}")
        if last.spool_files > 2 * (len(status.loaded) + 1):  # One retired version's files are kept a little longer.
            self.problems.append(f"{last.spool_files} files are spooled for {len(status.loaded)} versions")


async def soak(options: argparse.Namespace, folder: Path) -> Soak:
    """Start the server, soak it, end it."""
    section: dict[str, Any] = {"context_length": 512, "max_lora_rank": 8, "device": "cpu", "lease_s": 120.0}
    program = None
    if options.backend == "fake":
        model = tiny_model(folder / "model")
    else:
        venvs = Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")
        python = str(venvs / f"server-{options.backend}" / "bin" / "python")
        script, model = ROOT / "tests" / "engines" / "make_tiny_model.py", folder / "model"
        maker = venvs / "trainer" / "bin" / "python"  # SGLang's environment cannot import what this takes.
        subprocess.run([maker, script, model], check=True, capture_output=True, timeout=300)  # noqa: ASYNC221
        program = [python, "-m", "server_env.cli"]
        section |= {"backend": options.backend, "dtype": "float32", "cpu_kv_gib": 1}
    extra = tuple(word for setting in options.set for word in ("--set", setting))
    it = None
    try:
        async with served(
            folder, model, fake=program is None, program=program, arguments=extra, server=section, wait=False
        ) as server:
            await server.ready(options.deadline_s)
            it = Soak(options, server, await server.client("soak"), model)
            await it.run()
    except AssertionError as error:
        if it is None:
            raise
        it.problems.append(f"something was left behind: {error or it.server.leftovers()}")
    return it


def main() -> int:
    """Soak, print, and say whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=["vllm", "sglang", "fake"])
    parser.add_argument("--publishes", type=int, default=500, help="adapter versions (%(default)s)")
    parser.add_argument("--requests", type=int, default=20_000, help="of one or two completions (%(default)s)")
    parser.add_argument("--kills", type=int, default=5, help="of a process of the engine (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at once (%(default)s)")
    parser.add_argument("--tokens", type=int, default=6, help="most tokens of a completion (%(default)s)")
    parser.add_argument("--every", type=int, default=500, help="requests from one sample to the next (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, adapters and kills (%(default)s)")
    parser.add_argument("--growth-mib", type=float, default=32, help="tandem-server may grow (%(default)s)")
    parser.add_argument("--deadline-s", type=float, default=900, help="of one request, restarts included (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for tandem-server")
    parser.add_argument("--out", type=Path, help="a file for everything as JSON")
    options = parser.parse_args()
    if options.kills > options.requests // 2 or min(options.concurrency, options.every, options.tokens) < 1:
        parser.error("there must be two requests for each kill, and at least one of everything else")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-", ignore_cleanup_errors=True) as folder:
        it = asyncio.run(soak(options, Path(folder)))
    seconds, load = round(time.monotonic() - began, 1), round(statistics.median(it.loads_ms or [0]), 1)
    print(table(it.samples, it.settled()))
    print(f"{it.finished} requests, {it.serving} publishes (median load {load} ms), {it.tokens} tokens, {seconds} s")
    for kill in it.kills:
        print(f"back {kill['back_s']} s after the kill at request {kill['requests']}")
    print("\n".join(f"PROBLEM: {problem}" for problem in it.problems) or "nothing lost, doubled or left behind")
    if options.out:
        found = {"seconds": seconds, "requests": it.finished, "publishes": it.serving, "load_ms": load}
        found |= {"tokens": it.tokens, "kills": it.kills, "problems": it.problems, "options": vars(options)}
        found |= {"samples": [asdict(sample) for sample in it.samples]}
        options.out.write_text(json.dumps(found, indent=1, default=str) + "\n")
    return 1 if it.problems else 0


if __name__ == "__main__":
    sys.exit(main())
