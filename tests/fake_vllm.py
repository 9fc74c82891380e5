"""The fake engine in vLLM's words: its command line, its routes, its answers."""

import argparse
import asyncio
import json
import os
from pathlib import Path

from aiohttp import web

from fake_core import VOCAB, Ask, Fake, Unloadable, family, faults, run


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": status}}, status=status)


def refusal(fake: Fake, ask: dict) -> web.Response | None:
    """The answer to a question that cannot be."""
    model, prompt = ask["model"], ask["prompt"]
    if model != "base" and model not in fake.adapters:
        return error(404, f"The model `{model}` does not exist.")
    if not prompt or ask["max_tokens"] < 1 or len(prompt) >= fake.max_context:
        return error(400, "This prompt is empty or too long.")
    if max(prompt) >= VOCAB:
        return error(400, f"Token id {max(prompt)} is out of vocabulary")
    if not 0 <= ask["temperature"] <= 2:
        return error(400, f"temperature must be in [0, 2], got {ask['temperature']}")
    return None


async def completions(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    ask = json.loads(await request.read())
    model, prompt, n = ask["model"], ask["prompt"], ask.get("n", 1)
    if wrong := refusal(fake, ask):
        return wrong
    if fake.asleep:
        fake.journal("generated-asleep")
        return error(500, "asleep")
    fake.prompt_tokens += len(prompt)
    probe = prompt[0] == 1  # The server tries an engine with prompts of its own before it serves.
    try:
        if not probe and (fault := await fake.misbehave(request)):
            return error(500, fault)
    except asyncio.CancelledError:
        fake.journal("aborted", model=model)
        raise
    choices = [choice(fake, model, prompt, ask, i) for i in range(n)]
    if ask.get("prompt_logprobs") is not None:
        scores = zip(prompt, fake.score(model, prompt), strict=True)
        choices[0]["prompt_logprobs"] = [x if x is None else {str(t): {"logprob": x, "rank": 1}} for t, x in scores]
    fake.journal("generated", model=model, n=n, prompt=prompt)
    return web.json_response(
        {"model": "other" if "other-model" in fake.faults and not probe else model, "choices": choices}
    )


def choice(fake: Fake, model: str, prompt: list[int], ask: dict, index: int) -> dict:
    how = Ask(
        max_tokens=ask["max_tokens"],
        temperature=ask["temperature"],
        top_k=ask.get("top_k", 0),
        seed=ask.get("seed"),
        stop=tuple(ask.get("stop_token_ids", ())),
        ignore_eos=ask.get("ignore_eos", False),
    )
    found = fake.sample(model, prompt, how, index)
    return {
        "index": index,
        "text": "",
        "finish_reason": found.finish,
        "token_ids": found.ids if ask.get("return_token_ids") else None,
        "logprobs": None if ask.get("logprobs") is None else {"token_logprobs": found.logprobs},
        "prompt_logprobs": None,
    }


async def load(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    ask = await request.json()
    try:
        await fake.load(ask["lora_name"], Path(ask["lora_path"]))
    except Unloadable as refusal:
        return error(refusal.status, str(refusal))
    return web.Response(text=f"Success: LoRA adapter '{ask['lora_name']}' added successfully.")


async def unload(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    name = (await request.json())["lora_name"]
    fake.journal("unload", name=name)
    if "unload-hangs" in fake.faults:
        await asyncio.Event().wait()
    if fake.adapters.pop(name, None) is None:
        return error(404, f"The lora adapter '{name}' cannot be found.")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def models(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    base = {"id": "base", "object": "model", "max_model_len": fake.max_context}
    adapters = [{"id": name, "object": "model", "max_model_len": None} for name in fake.adapters]
    return web.json_response({"object": "list", "data": [base, *adapters]})


async def metrics(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    labels = 'engine="0",model_name="base"'
    families = [
        family("vllm:num_requests_running", "gauge", labels, 0),
        family("vllm:num_requests_waiting", "gauge", labels, 0),
        family("vllm:kv_cache_usage_perc", "gauge", labels, 0),
        family("vllm:prefix_cache_queries_total", "counter", labels, fake.prompt_tokens),
        family("vllm:prefix_cache_hits_total", "counter", labels, 0),
        family("vllm:prompt_tokens_total", "counter", labels, fake.prompt_tokens),
        family("vllm:generation_tokens_total", "counter", labels, fake.generation_tokens),
    ]
    return web.Response(text="".join(families))


async def sleep(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    fake.asleep = {"weights", "kv_cache"}
    fake.journal("sleep", level=request.query["level"])
    return web.json_response({"status": "sleeping"})


async def wake(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    fake.asleep -= set(request.query.getall("tags"))
    fake.journal("wake", tags=request.query.getall("tags"))
    return web.json_response({"status": "awake"})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.0.fake"})


async def health(request: web.Request) -> web.Response:
    return web.Response()


def main() -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--uds", "--model", "--served-model-name"):
        parser.add_argument(flag, required=True)
    for flag, default in (("--max-model-len", 512), ("--max-lora-rank", 8), ("--max-loras", 1), ("--max-cpu-loras", 1)):
        parser.add_argument(flag, type=int, default=default)
    for flag, default in (("--nnodes", 1), ("--node-rank", 0), ("--master-port", 0)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--master-addr")
    options, others = parser.parse_known_args()
    print("fake engine; other options:", others, flush=True)
    fake = Fake(options.max_model_len, options.max_lora_rank, options.max_cpu_loras, faults(options.uds))
    routes = {
        ("POST", "/v1/completions"): completions,
        ("POST", "/v1/load_lora_adapter"): load,
        ("POST", "/v1/unload_lora_adapter"): unload,
        ("GET", "/v1/models"): models,
        ("GET", "/metrics"): metrics,
        ("GET", "/version"): version,
        ("GET", "/health"): health,
    }
    if os.environ.get("VLLM_SERVER_DEV_MODE") == "1":
        routes |= {("POST", "/sleep"): sleep, ("POST", "/wake_up"): wake}
    nodes = (options.nnodes, options.node_rank, f"{options.master_addr}:{options.master_port}")
    run(fake, routes, nodes=nodes, path=options.uds, handler_cancellation=True)
