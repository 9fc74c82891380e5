"""The fake engine in SGLang's words: its command line, its keys, its routes, and the ways in which it dies."""

import argparse
import asyncio
import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from fake_core import VOCAB, Ask, Fake, Unloadable, exists, family, faults, run

OPEN = ("/health", "/metrics", "/ready")
ADMIN = ("load", "unload", "abort", "flush", "release", "resume")


@dataclass
class FakeSGLang(Fake):
    """Beside the adapters: where each was loaded from, who is asked what, and the lock that loads and unloads share."""

    keys: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    users: dict[str, int] = field(default_factory=dict)
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def generate(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    ask = json.loads(await request.read())
    adapter = ask.get("lora_path") or ""
    for prompt, sampling in zip(ask["input_ids"], ask["sampling_params"], strict=True):
        if len(prompt) >= fake.max_context or len(prompt) + sampling["max_new_tokens"] > fake.max_context:
            return error(400, "Requested token count exceeds the model's maximum context length.")
        if sampling["temperature"] < 0:
            return error(400, f"temperature must be non-negative, got {sampling['temperature']}.")
        if not prompt or min(prompt) < 0 or max(prompt) >= VOCAB:
            os._exit(1)
    if adapter and adapter not in fake.adapters:
        if adapter not in fake.paths:
            return error(400, f"Got LoRA adapter that has never been loaded: {adapter}")
        await fake.load(adapter, fake.paths[adapter])  # What the real one does, and must never be asked to.
        fake.journal("resurrected", name=adapter)
    fake.users[adapter] = fake.users.get(adapter, 0) + 1
    try:
        return await answer(request, fake, adapter, ask)
    finally:
        fake.users[adapter] -= 1


async def answer(request: web.Request, fake: FakeSGLang, adapter: str, ask: dict) -> web.Response:
    if fake.asleep:
        fake.journal("generated-asleep")
        return error(500, "asleep")
    rids, prompts, samplings = ask["rid"], ask["input_ids"], ask["sampling_params"]
    fake.prompt_tokens += sum(map(len, prompts))
    aborted = asyncio.Event()
    fake.running |= dict.fromkeys(rids, aborted)
    trouble = asyncio.create_task(fake.misbehave(request) if prompts[0][0] != 1 else asyncio.sleep(0, ""))
    stopped = asyncio.create_task(aborted.wait())
    await asyncio.wait({trouble, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not trouble.done() and "abort-holds" in fake.faults:
        await exists(fake.faults["abort-holds"])
    for rid in rids:
        del fake.running[rid]
    stopped.cancel()
    if not trouble.done():
        trouble.cancel()
        fake.journal("aborted", model=adapter)
    elif trouble.result():
        return error(500, trouble.result())
    answers = [
        completion(fake, adapter, prompt, sampling, i, ask)
        for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    fake.journal("generated", model=adapter, n=len(rids), prompt=prompts[0])
    return web.json_response(answers)


def completion(  # noqa: PLR0917
    fake: FakeSGLang, adapter: str, prompt: list[int], sampling: dict, index: int, ask: dict
) -> dict:
    how = Ask(
        max_tokens=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        top_k=max(0, sampling.get("top_k", -1)),
        seed=sampling.get("sampling_seed"),
        stop=tuple(sampling.get("stop_token_ids") or ()),
        ignore_eos=sampling.get("ignore_eos", False),
    )
    found = fake.sample(adapter, prompt, how, index)
    meta: dict = {"finish_reason": {"type": found.finish}, "prompt_tokens": len(prompt)}
    if ask.get("return_logprob"):
        meta["output_token_logprobs"] = [[x, t, None] for x, t in zip(found.logprobs, found.ids, strict=True)]
    if ask.get("return_sampling_mask"):
        meta["output_token_sampling_logprobs"] = found.logprobs
    if ask.get("logprob_start_len", -1) == 0:
        scores = fake.score(adapter, prompt)
        meta["input_token_logprobs"] = [[x, t, None] for x, t in zip(scores, prompt, strict=True)]
    return {"text": "", "output_ids": found.ids, "meta_info": meta}


async def openai(request: web.Request) -> web.StreamResponse:
    """/v1/completions: an event at once, and the rest when it is let."""
    fake: FakeSGLang = request.app["fake"]
    ask = json.loads(await request.read())
    adapter = ask["model"].partition(":")[2] or ask.get("lora_path") or ""
    if max(ask["prompt"]) >= VOCAB or fake.asleep:
        os._exit(1)
    if adapter and adapter not in fake.adapters:
        return error(400, f"Got LoRA adapter that has never been loaded: {adapter}")
    fake.users[adapter] = fake.users.get(adapter, 0) + 1
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b'data: {"choices": [{"text": "one"}]}\n\n')
    await fake.misbehave(request)
    await response.write(b"data: [DONE]\n\n")
    fake.users[adapter] -= 1
    fake.journal("generated", model=adapter)
    return response


async def abort(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    if event := fake.running.get((await request.json())["rid"]):
        event.set()
    return web.Response()


async def load(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    ask = await request.json()
    name, path = ask["lora_name"], Path(ask["lora_path"])
    async with fake.lock:
        try:
            await fake.load(name, path)
        except Unloadable as refusal:
            status = 500 if "load-500" in fake.faults else 400
            return web.json_response({"success": False, "error_message": str(refusal)}, status=status)
    fake.paths[name] = path
    return loaded(fake)


async def unload(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    name = (await request.json())["lora_name"]
    fake.journal("unload", name=name)
    async with fake.lock:
        if "unload-hangs" in fake.faults:
            await asyncio.Event().wait()
        while fake.users.get(name):  # noqa: ASYNC110 (simpler than an event for each adapter)
            await asyncio.sleep(0.01)
        if fake.adapters.pop(name, None) is None:
            message = f"LoRA with name {name} does not exist."
            return web.json_response({"success": False, "error_message": message}, status=400)
    return loaded(fake)


def loaded(fake: FakeSGLang) -> web.Response:
    names = {name: str(fake.paths[name]) for name in fake.adapters}
    return web.json_response({"success": True, "error_message": "", "loaded_adapters": names})


async def models(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    adapters = [{"id": name, "max_model_len": None} for name in fake.adapters]
    return web.json_response({"data": [{"id": "model", "max_model_len": fake.max_context}, *adapters]})


async def info(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.0.fake"})


async def metrics(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    labels = 'engine_type="unified",model_name="m"'
    families = [
        family("sglang:num_running_reqs", "gauge", labels, len(fake.running)),
        family("sglang:num_queue_reqs", "gauge", labels, 0),
        family("sglang:token_usage", "gauge", labels, 0),
        family("sglang:cache_hit_rate", "gauge", labels, 0),
        family("sglang:prompt_tokens_total", "counter", labels, fake.prompt_tokens),
        family("sglang:generation_tokens_total", "counter", labels, fake.generation_tokens),
    ]
    return web.Response(text="".join(families))


async def health(request: web.Request) -> web.Response:
    if request.path == "/health" and request.app["fake"].asleep:
        request.app["fake"].journal("generated-asleep")  # The real one samples a token.
    return web.Response()


async def flush(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    fake.journal("flush", running=len(fake.running))
    return web.Response(status=400 if fake.running else 200)


async def release(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    if fake.running:
        os._exit(1)
    tags = (await request.json())["tags"]
    fake.asleep |= set(tags)
    fake.journal("sleep", tags=tags)
    return web.Response()


async def resume(request: web.Request) -> web.Response:
    fake: FakeSGLang = request.app["fake"]
    tags = (await request.json())["tags"]
    if not set(tags) <= fake.asleep:
        os._exit(1)
    fake.asleep -= set(tags)
    fake.journal("wake", tags=tags)
    return web.Response()


@web.middleware
async def guarded(request: web.Request, handler) -> web.StreamResponse:
    """With a normal key and an administrator's, each opens its own routes only."""
    keys = request.app["fake"].keys
    key = keys["admin-api-key" if request.path.strip("/").startswith(ADMIN) and request.method == "POST" else "api-key"]
    if request.path not in OPEN and request.headers.get("Authorization") != f"Bearer {key}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    return await handler(request)


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--host", "--model-path"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--config", type=Path, required=True)
    for flag, default in (
        ("--port", 0),
        ("--context-length", 512),
        ("--max-lora-rank", 8),
        ("--max-loras-per-batch", 8),
        ("--max-loaded-loras", 8),
        ("--nnodes", 1),
        ("--node-rank", 0),
    ):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--dist-init-addr")
    options, others = parser.parse_known_args()
    assert stat.S_IMODE(options.config.stat().st_mode) == 0o600
    keys = json.loads(options.config.read_text())
    print("fake engine; other options:", others, keys, flush=True)
    fake = FakeSGLang(
        options.context_length, options.max_lora_rank, options.max_loaded_loras, faults(str(options.config))
    )
    fake.keys = keys
    routes = {
        ("POST", "/generate"): generate,
        ("POST", "/load_lora_adapter"): load,
        ("POST", "/unload_lora_adapter"): unload,
        ("POST", "/abort_request"): abort,
        ("POST", "/flush_cache"): flush,
        ("POST", "/release_memory_occupation"): release,
        ("POST", "/resume_memory_occupation"): resume,
        ("POST", "/v1/completions"): openai,
        ("GET", "/v1/models"): models,
        ("GET", "/server_info"): info,
        ("GET", "/metrics"): metrics,
        ("GET", "/health"): health,
        ("GET", "/ready"): health,
    }
    nodes = (options.nnodes, options.node_rank, options.dist_init_addr)
    run(fake, routes, middlewares=[guarded], nodes=nodes, host=options.host, port=options.port)
