"""From the end of an optimizer step to the first token of the new version, part by part, beside what it must cost.

    .venvs/trainer/bin/python benchmarks/sync.py vllm|sglang [--model FOLDER] [--ranks 8,32,128] [--out FILE]

Needs the trainer environment's Python. A server is started as a run starts its own, once, with room for the largest
rank. Each publish is of other weights. All in milliseconds:

    gather   the adapter's tensors from the device as one safetensors file, with its digest (digest: that part, beside)
    bridge   the way to the server, and what the server does before it writes and after it has loaded
    write    the file, on tmpfs where there is room
    load     into the engine
    first    a request of one token that asks for at least this version
    again    beside: such a request once more, of another prompt, now that the version is in use
    ping     beside: an empty message to the server and back
    proof    beside: two rows of 48 tokens scored under this version, as the proof of sync has them

The floor, in turns with it: the same number of bytes in one copy from the device, a file of the same size written to
tmpfs, loaded over the engine's own HTTP route, and one token asked for over it, all of the same engine.

gpu_bytes in the file is what each GPU holds before and after the publishes that count.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

import direct
import policy
from bridge import protocol as p
from bridge.digest import digest
from gpu_use import in_use
from rig import DEADLINE_S, Report, Rig, numbers, parser, rig, say, summary
from trainer_env.proof.probe import ROW_TOKENS, ROWS
from trainer_env.publishing.packing import Packed, Packer

CONTEXT = 512
PROMPT_TOKENS = 32
MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 1 << 30
"""Containers often have 64 MiB of tmpfs: too little for adapters. tandem-server draws the same line."""

PARTS = ("gather", "bridge", "write", "load", "first")
TITLES = {
    "total": "step end to first token",
    "digest": "of gather: digest",
    "proof": "beside: proof, the server's part",
    "again": "beside: a first token once more",
    "ping": "beside: ping",
}

Times = dict[str, float]
"""Milliseconds by part."""


class Clock:
    """Milliseconds from one lap to the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Since the last lap."""
        last, self._last = self._last, time.perf_counter()
        return 1000 * (self._last - last)


class Sync:
    """Publishes of one model through Tandem, and the floor of each."""

    def __init__(self, it: Rig, engine: direct.Direct, run: direct.Run, folder: Path) -> None:
        self._client = it.client
        self._engine = engine
        self._run = run
        self._folder = folder
        rng = random.Random(0)
        self._prompt, self._another = (rng.choices(it.token_ids, k=PROMPT_TOKENS) for _ in range(2))
        self._rows = [rng.choices(it.token_ids, k=ROW_TOKENS) for _ in range(ROWS)]
        self._version = 0

    def publish(self, model: Any, packer: Packer) -> Times:
        """Step, publish, and ask for a token of the new version."""
        self._version += 1
        policy.step(model)
        clock = Clock()
        packed = packer.pack()
        times = {"gather": clock.lap()}
        request = p.PublishAdapter(
            version=self._version,
            digest=packed.digest,
            adapter_config=packed.adapter_config,
            deadline_s=DEADLINE_S,
        )
        loaded: p.AdapterLoaded = self._client.ask(request, packed.payload)
        write, load = 1000 * loaded.spool_s, 1000 * loaded.load_s
        times |= {"bridge": clock.lap() - write - load, "write": write, "load": load}
        answer = self._token(self._prompt)
        times["first"] = clock.lap()
        if answer.version != self._version or loaded.alias_of >= 0:
            raise RuntimeError(f"version {self._version} was published, version {answer.version} answers: {loaded}")
        self._token(self._another)
        beside = {"again": clock.lap(), "digest": _digest(packed), "proof": self._proof(), "ping": self._ping()}
        return {**times, "total": sum(times.values()), **beside}

    def _token(self, prompt: list[int]) -> p.Generated:
        """One of the newest version."""
        request = p.Generate(
            prompt=p.pack_ids(prompt),
            sampling=p.Sampling(max_tokens=1, ignore_eos=True),
            min_version=self._version,
            deadline_s=DEADLINE_S,
        )
        return self._client.ask(request)

    def _proof(self) -> float:
        clock = Clock()
        asks = [
            self._client.submit(p.Score(token_ids=p.pack_ids(row), version=self._version, deadline_s=DEADLINE_S))
            for row in self._rows
        ]
        for asked in asks:
            asked.result()
        return clock.lap()

    def _ping(self) -> float:
        clock = Clock()
        self._client.ask(p.Ping(deadline_s=DEADLINE_S))
        return clock.lap()

    def floor(self, model: Any, packer: Packer) -> Times:
        """The same for an engine that is asked directly, of other weights again."""
        policy.step(model)
        packed = packer.pack()
        copy = _copy(model)
        path, name = self._folder / "adapter", f"direct-{self._version}"
        path.mkdir()
        adapter_config = msgspec.json.encode(packed.adapter_config)
        clock = Clock()
        (path / "adapter_model.safetensors").write_bytes(packed.payload)
        (path / "adapter_config.json").write_bytes(adapter_config)
        times = {"gather": copy, "write": clock.lap()}
        self._run(self._engine.load(name, path))
        times["load"] = clock.lap()
        self._run(self._engine.generate(name, self._prompt, 1, p.Sampling(max_tokens=1, ignore_eos=True)))
        times["first"] = clock.lap()
        self._run(self._engine.unload(name))
        shutil.rmtree(path)
        return {**times, "total": sum(times.values())}


def _digest(packed: Packed) -> float:
    clock = Clock()
    digest(packed.payload)
    return clock.lap()


def _copy(model: Any) -> float:
    """One plain copy of as many bytes as the adapter has, from the device to memory that waits for it."""
    import torch

    tensors = policy.trained(model)
    there = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    here = torch.zeros(there.shape, dtype=there.dtype, pin_memory=there.is_cuda)
    if there.is_cuda:
        torch.cuda.synchronize()
    clock = Clock()
    here.copy_(there)
    return clock.lap()


def measure(sync: Sync, rank: int, model: Any, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """One rank: Tandem and the floor in turns. dtype: of the tensors that are sent."""
    ours, floors, packer = [], [], Packer(model, dtype=dtype)
    before: list[int] = []
    for turn in range(options.warm_up + options.publishes):
        if turn == options.warm_up:
            before = in_use()
        timed = sync.publish(model, packer), sync.floor(model, packer)
        if turn >= options.warm_up:
            ours.append(timed[0])
            floors.append(timed[1])
    megabytes = sum(tensor.numel() * 4 for tensor in policy.trained(model)) / 1e6
    ms = {part: summary([times[part] for times in ours]) for part in ours[0]}
    floor_ms = {part: summary([times[part] for times in floors]) for part in floors[0]}
    return {
        "rank": rank,
        "megabytes": round(megabytes, 2),
        "sent_megabytes": round(packer.pack().payload.nbytes / 1e6, 2),
        "publishes": options.publishes,
        "factor": round(ms["total"]["median"] / floor_ms["total"]["median"], 3),
        "ms": ms,
        "floor_ms": floor_ms,
        "gpu_bytes": {"before": before, "after": in_use()},
    }


def table(found: list[dict[str, Any]]) -> Table:
    """Medians and worsts, a block for each rank."""
    drawn = Table(title="Optimizer step end to first token of the new version, ms")
    for name in ("adapter", "part"):
        drawn.add_column(name)
    for name in ("Tandem", "worst", "floor", "worst", "factor"):
        drawn.add_column(name, justify="right")
    for one in found:
        about = (f"rank {one['rank']}", f"{one['megabytes']:.3g} MB fp32", f"{one['sent_megabytes']:.3g} MB sent")
        for row, part in enumerate((*PARTS, *TITLES)):
            first = about[row] if row < len(about) else ""
            ours, floor = one["ms"][part], one["floor_ms"].get(part)
            cells = [f"{value:.1f}" for each in (ours, floor) if each for value in (each["median"], each["worst"])]
            factor = [f"{ours['median'] / floor['median']:.3g}"] if floor else []
            style = "bold" if part == "total" else None
            drawn.add_row(first, TITLES.get(part, part), *cells, *factor, style=style)
        drawn.add_section()
    return drawn


def main() -> int:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=numbers, default=[8, 32, 128], help="of the adapters (8,32,128)")
    arguments.add_argument("--publishes", type=int, default=30, help="of each rank (%(default)s)")
    arguments.add_argument("--warm-up", type=int, default=3, help="publishes of each rank before (%(default)s)")
    options = arguments.parse_args()
    room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES
    with (
        rig(options, lora__r=max(options.ranks), model__max_seq_length=CONTEXT) as it,
        tempfile.TemporaryDirectory(prefix="tandem-bench-", dir=MEMORY if room else None) as folder,
        direct.connected(options.backend, it.listening) as (engine, run),
    ):
        sync, report = Sync(it, engine, run, Path(folder)), Report(options, it)
        for rank in options.ranks:
            say(f"rank {rank}")
            model = policy.make(it.model, rank, it.device)
            report.add(measure(sync, rank, model, it.publish_dtype, options))
        report.show(table(report.found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
