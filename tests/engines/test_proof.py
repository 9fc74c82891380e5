"""The proof of sync on real engines: honest publishes raise no alarm, and sabotage of the way there is caught.

The server half is real, the trainer's part is Hugging Face in float32, and the verdicts come from what a run uses.
"""

import json
import math
import os
import random
import shutil
from array import array
from collections import Counter

import pytest
import pytest_asyncio

import lora_files
from bridge import protocol as p
from served import generate, score, served
from server_env.adapters.peft_adapter import read_header
from trainer_env.proof import comparisons

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800), pytest.mark.slow]

START_S = 600
PUBLISHES = 200 if os.environ.get("TANDEM_TEST_FULL") == "1" else 40
CACHED_EVERY = 10
STEP = 0.004
"""By which a publish moves each entry of B, as an optimizer step of a high learning rate does."""
ROWS = [[random.Random(row).randrange(4, 512) for _ in range(48)] for row in range(2)]
SERVER = {"context_length": 512, "cpu_kv_gib": 1}
DTYPES = {"vllm": "float32", "sglang": "bfloat16"}
"""In bfloat16 vLLM's CPU attention ends with an illegal instruction at so small a head."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["vllm", "sglang"])
async def client(request, tiny, python_of, tmp_path_factory):
    program = [str(python_of(request.param)), "-m", "server_env.cli"]
    section = {**SERVER, "backend": request.param, "dtype": DTYPES[request.param]}
    folder = tmp_path_factory.mktemp(request.param)
    async with served(folder, tiny, fake=False, program=program, server=section, wait=False, lease_s=1800.0) as it:
        await it.ready(START_S)
        yield await it.client("run")


@pytest.fixture
def trainer(reference, tmp_path):
    """The trainer's logprobs of the rows: under the base model, or under an adapter."""

    def logprobs(adapter=None, model=None):
        folder = ""
        if adapter:
            folder = tmp_path / adapter.digest
            if not folder.exists():
                adapter.write(folder)
        other = {"model": str(model)} if model else {}
        questions = [{"ids": row, "temperature": 1.0, "adapter": str(folder), **other} for row in ROWS]
        return joined(reference.logprobs(questions))

    return logprobs


def joined(rows):
    return [logprob for row in rows for logprob in row]


async def scored(client, version):
    answers = [await client.ask(score(row, version=version, deadline_s=60)) for row in ROWS]
    return joined(p.unpack_logprobs(answer.logprobs) for answer in answers)


def walk(tiny, rng, rank=4):
    """Adapters as training makes them: B begins at 0 and moves a little at each publish, partly in one direction."""
    header = read_header(memoryview(lora_files.make(tiny, 0, rank=rank).data))
    values, drift = {}, {}
    for name, tensor in header.items():
        size = math.prod(tensor.shape)
        scale = 0.0 if "lora_B" in name else 1 / math.sqrt(tensor.shape[1])
        values[name] = [rng.gauss(0, scale) if scale else 0.0 for _ in range(size)]
        drift[name] = [rng.gauss(0, 1) for _ in range(size)]
    while True:
        for name, old in values.items():
            if "lora_B" in name:
                values[name] = [b + STEP * (d / 4 + rng.gauss(0, 1)) for b, d in zip(old, drift[name], strict=True)]
        yield lora_files.pack({name: (header[name].shape, value) for name, value in values.items()}, rank)


async def test_honest_publishes_raise_no_alarm(client, tiny, trainer, record_property):
    trainer_base, server_base = trainer(), await scored(client, 0)
    noise = comparisons.sigma(trainer_base, server_base)
    base = comparisons.base(trainer_base, server_base)
    prefix = joined(ROWS)
    found, cached = [], []
    for version, adapter in zip(range(1, PUBLISHES + 1), walk(tiny, random.Random(1)), strict=False):
        await client.ask(adapter.publish(version), adapter.data)
        ours = comparisons.less(trainer(adapter), trainer_base)
        found.append(comparisons.shift(ours, comparisons.less(await scored(client, version), server_base), noise))
        if version % CACHED_EVERY == 0:
            await client.ask(generate(prefix, version=0, max_tokens=1, ignore_eos=True))
            ask = generate(prefix, version=version, max_tokens=8, ignore_eos=True)
            completion = (await client.ask(ask)).completions[0]
            ids = p.unpack_ids(completion.token_ids)
            again = p.unpack_logprobs((await client.ask(score([*prefix, *ids], version=version))).logprobs)
            cached.append(comparisons.cached_prefix(p.unpack_logprobs(completion.logprobs), again[-len(ids) :], noise))
    counts = Counter(finding.verdict for finding in found), Counter(finding.verdict for finding in cached)
    record_property("verdicts", str(counts))
    print(
        f"\nnoise {noise:.4f}; {base.what}; {counts}; first {found[0].what}; last {found[-1].what}; {cached[-1].what}"
    )
    assert base.verdict == "agrees"
    assert not [finding for finding in (*found, *cached) if finding.verdict == "disagrees"]
    assert {finding.verdict for finding in found[PUBLISHES // 2 :]} == {"agrees"}


# ---- the canary, and what can happen to it on its way ---------------------------------------------------------------


def canary_adapter(tiny):
    return lora_files.make(tiny, 5, rank=8, scale=0.12)


def edited(adapter, change):
    """An adapter with the values of some tensors changed: change(name, values) -> values."""
    data = adapter.data
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, tensor in read_header(memoryview(data)).items():
        values = array("f")
        values.frombytes(data[start + tensor.data_offsets[0] : start + tensor.data_offsets[1]])
        tensors[name] = (tensor.shape, change(name, list(values)))
    return lora_files.pack(tensors, adapter.config["r"])


def without(adapter, module):
    return edited(adapter, lambda name, values: [0.0] * len(values) if f"{module}.lora_B" in name else values)


async def verdicts(client, trainer, meant, sent, model=None):
    """What the checks of the first rollout say when the trainer computes one canary and the engine gets another."""
    rows = tuple(map(p.pack_ids, ROWS))
    ask = p.Canary(digest=sent.digest, adapter_config=sent.config, rows=rows, deadline_s=120)
    answers = await client.ask(ask, sent.data)
    base, server_base = trainer(model=model), joined(map(p.unpack_logprobs, answers.base))
    canary = comparisons.canary(
        trainer_base=base,
        trainer=trainer(meant, model),
        without={module: trainer(without(meant, module), model) for module in lora_files.ALL},
        server_base=server_base,
        server=joined(map(p.unpack_logprobs, answers.adapted)),
    )
    noise = comparisons.sigma(base, server_base)
    cached = comparisons.cached_prefix(p.unpack_logprobs(answers.sampled), p.unpack_logprobs(answers.rescored), noise)
    return {found.check: found for found in (comparisons.base(base, server_base), canary, cached)}


def objections(found):
    return [check for check, finding in found.items() if finding.verdict == "disagrees"]


async def test_an_honest_canary_agrees(client, tiny, trainer):
    adapter = canary_adapter(tiny)
    found = await verdicts(client, trainer, adapter, adapter)
    print("\n" + "\n".join(finding.what for finding in found.values()))
    assert {finding.verdict for finding in found.values()} == {"agrees"}


@pytest.mark.parametrize("module", lora_files.ALL[2:])
async def test_a_module_that_is_lost_on_the_way_is_named(client, tiny, trainer, module):
    """Queries and keys of this random model do next to nothing on these rows; tests/trainer has them."""
    adapter = canary_adapter(tiny)
    found = await verdicts(client, trainer, adapter, without(adapter, module))
    assert objections(found) == ["canary"]
    assert f"leaves {module} out" in found["canary"].why


async def test_an_adapter_that_does_nothing_there_is_caught(client, tiny, trainer):
    adapter = canary_adapter(tiny)
    nothing = edited(adapter, lambda name, values: [0.0] * len(values) if "lora_B" in name else values)
    assert objections(await verdicts(client, trainer, adapter, nothing)) == ["canary"]


async def test_another_adapters_bytes_are_caught(client, tiny, trainer):
    other = lora_files.make(tiny, 6, rank=8, scale=0.12)
    assert objections(await verdicts(client, trainer, canary_adapter(tiny), other)) == ["canary"]


async def test_another_base_model_is_caught(client, tiny, trainer, tmp_path):
    model = tmp_path / "other"
    shutil.copytree(tiny, model)
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    rng = random.Random(2)
    for name, entry in json.loads(data[8:start]).items():
        if "layers.1" in name:
            first, end = (start + offset for offset in entry["data_offsets"])
            weights = array("f", data[first:end])
            data[first:end] = array("f", (w * (1 + rng.gauss(0, 0.4)) for w in weights)).tobytes()
    path.write_bytes(data)
    adapter = canary_adapter(tiny)
    assert "base model" in objections(await verdicts(client, trainer, adapter, adapter, model))
