"""A small real HTTP process that speaks vLLM's routes and misbehaves on request. It takes vLLM's command line.

    python fake_engine.py --uds SOCKET --model FOLDER --max-model-len 512 …

Tokens and logprobs come from a hash of the adapter's bytes and the last tokens: same question, same answer, and another
adapter gives other answers. TANDEM_FAKE_FAULT says how to misbehave: faults separated by commas, each
`name[:argument][@life]`; `@1` limits one to the engine's first life. TANDEM_FAKE_JOURNAL names a file that gets a JSON
line for each thing that happened. `tests/engines/test_routes.py` holds it to what the real vLLM answers.

Faults: dies-at-start, never-listens, port-clash, slow-start:SECONDS, no-route:ROUTE, old-logprobs, ignores-sigterm,
has-child, flat (every token is as likely as any other); on generation: dies, hangs, freezes (the whole process),
answers-500, drops-connection, shifts-logprobs, other-model, holds:FILE (answers when FILE exists); on loading:
load-500, load-400, load-hangs, load-dies, unlisted, ignores-adapter.
"""

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

EOS = 2
POLL_S = 0.01


def faults(life: int) -> dict[str, str]:
    """Faults of this life, by name, with their arguments."""
    found = {}
    for word in filter(None, os.environ.get("TANDEM_FAKE_FAULT", "").split(",")):
        plain, at, only = word.partition("@")
        name, _, argument = plain.partition(":")
        if not at or int(only) == life:
            found[name] = argument
    return found


@dataclass
class Fake:
    """The engine's state."""

    options: argparse.Namespace
    faults: dict[str, str]
    vocab: int
    adapters: dict[str, bytes] = field(default_factory=dict)
    generation_tokens: int = 0
    prompt_tokens: int = 0
    asleep: set[str] = field(default_factory=set)

    def journal(self, event: str, **facts) -> None:
        path = os.environ.get("TANDEM_FAKE_JOURNAL")
        if path:
            with Path(path).open("a") as file:
                file.write(json.dumps({"event": event, "pid": os.getpid(), **facts}) + "\n")

    def log_probabilities(self, adapter: str, before: list[int], temperature: float, top_k: int) -> list[float]:
        """Of every next token, after `before`."""
        if "flat" in self.faults and not top_k:
            return [-math.log(self.vocab)] * self.vocab
        identity = b"" if "ignores-adapter" in self.faults else self.adapters.get(adapter, b"")
        rng = random.Random(hashlib.sha256(identity + repr(before[-3:]).encode()).digest())
        logits = [rng.gauss(0, 2) / temperature for _ in range(self.vocab)]
        if top_k > 0:
            least = sorted(logits)[-top_k]
            logits = [x if x >= least else -math.inf for x in logits]
        total = math.log(sum(math.exp(x) for x in logits))
        return [x - total for x in logits]

    def sample(self, adapter: str, prompt: list[int], ask: dict, index: int) -> dict:
        greedy = ask["temperature"] == 0
        rng = random.Random(
            repr((ask.get("seed"), index, prompt, time.monotonic_ns() if ask.get("seed") is None else 0))
        )
        ids, logprobs, finish = [], [], "length"
        for _ in range(min(ask["max_tokens"], self.options.max_model_len - len(prompt))):
            options = (1.0, 0) if greedy else (ask["temperature"], ask.get("top_k", 0))
            every = self.log_probabilities(adapter, prompt + ids, *options)
            weights = [math.exp(x) for x in every]
            token = every.index(max(every)) if greedy else rng.choices(range(self.vocab), weights)[0]
            ids.append(token)
            if "old-logprobs" in self.faults:
                every = self.log_probabilities(adapter, prompt + ids[:-1], 1.0, 0)
            logprobs.append(every[token] + (0.1 if "shifts-logprobs" in self.faults else 0.0))
            if token in {*([] if ask.get("ignore_eos") else [EOS]), *ask.get("stop_token_ids", [])}:
                finish = "stop"
                break
        self.generation_tokens += len(ids)
        return {
            "index": index,
            "text": "",
            "finish_reason": finish,
            "token_ids": ids if ask.get("return_token_ids") else None,
            "logprobs": None if ask.get("logprobs") is None else {"token_logprobs": logprobs},
            "prompt_logprobs": None,
        }

    def score(self, adapter: str, prompt: list[int]) -> list:
        found: list[dict | None] = [None]
        for i in range(1, len(prompt)):
            every = self.log_probabilities(adapter, prompt[:i], 1.0, 0)
            found.append({str(prompt[i]): {"logprob": every[prompt[i]], "rank": 1}})
        return found


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "x", "param": None, "code": status}}, status=status)


def refusal(fake: Fake, ask: dict) -> web.Response | None:
    """The answer to a question that cannot be."""
    model, prompt = ask["model"], ask["prompt"]
    if model != "base" and model not in fake.adapters:
        return error(404, f"The model `{model}` does not exist.")
    if not prompt or ask["max_tokens"] < 1 or len(prompt) >= fake.options.max_model_len:
        return error(400, "This prompt is empty or too long.")
    if max(prompt) >= fake.vocab:
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
        if not probe and (fault := await misbehave(fake, request)):
            return fault
    except asyncio.CancelledError:
        fake.journal("aborted", model=model)
        raise
    choices = [fake.sample(model, prompt, ask, i) for i in range(n)]
    if ask.get("prompt_logprobs") is not None:
        choices[0]["prompt_logprobs"] = fake.score(model, prompt)
    fake.journal("generated", model=model, n=n)
    return web.json_response(
        {"model": "other" if "other-model" in fake.faults and not probe else model, "choices": choices}
    )


async def misbehave(fake: Fake, request: web.Request) -> web.Response | None:
    """Everything that can go wrong with a generation."""
    fake.journal("asked")
    if "dies" in fake.faults:
        os._exit(13)
    if "freezes" in fake.faults:
        time.sleep(3600)  # noqa: ASYNC251 (the fault is that nothing else runs)
    if "hangs" in fake.faults:
        await asyncio.Event().wait()
    if "holds" in fake.faults:
        while not Path(fake.faults["holds"]).exists():  # noqa: ASYNC110 (another process makes the file)
            await asyncio.sleep(POLL_S)
    if "drops-connection" in fake.faults:
        assert request.transport
        request.transport.abort()
        del fake.faults["drops-connection"]
    return error(500, "an inner fault") if "answers-500" in fake.faults else None


async def load(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    ask = await request.json()
    name, path = ask["lora_name"], Path(ask["lora_path"])
    fake.journal("load", name=name, path=str(path), files=sorted(p.name for p in path.glob("*")))
    if "load-hangs" in fake.faults:
        await asyncio.Event().wait()
    if "load-dies" in fake.faults:
        os._exit(14)
    if "load-500" in fake.faults or "load-400" in fake.faults:
        return error(500 if "load-500" in fake.faults else 400, "this adapter is not to my taste")
    if name in fake.adapters:
        return error(400, f"The lora adapter '{name}' has already been loaded.")
    if not path.is_dir():
        return error(404, f"Loading lora {name} failed: No adapter found for <path>")
    if len(fake.adapters) >= fake.options.max_cpu_loras:
        return error(500, "more adapters than --max-cpu-loras: the real one would begin to read them again and again")
    if json.loads((path / "adapter_config.json").read_text())["r"] > fake.options.max_lora_rank:
        return error(500, "LoRA rank is greater than max_lora_rank")
    if "unlisted" not in fake.faults:
        fake.adapters[name] = hashlib.sha256((path / "adapter_model.safetensors").read_bytes()).digest()
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    name = (await request.json())["lora_name"]
    fake.journal("unload", name=name)
    if fake.adapters.pop(name, None) is None:
        return error(404, f"The lora adapter '{name}' cannot be found.")
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


async def models(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    base = {"id": "base", "object": "model", "max_model_len": fake.options.max_model_len}
    adapters = [{"id": name, "object": "model", "max_model_len": None} for name in fake.adapters]
    return web.json_response({"object": "list", "data": [base, *adapters]})


async def metrics(request: web.Request) -> web.Response:
    fake: Fake = request.app["fake"]
    lines = f'vllm:prompt_tokens_total{{engine="0"}} {fake.prompt_tokens}.0\n'
    lines += f'vllm:generation_tokens_total{{engine="0"}} {fake.generation_tokens}.0\n'
    return web.Response(text=lines)


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for flag in ("--uds", "--model", "--served-model-name"):
        parser.add_argument(flag, required=True)
    for flag, default in (("--max-model-len", 512), ("--max-lora-rank", 8), ("--max-loras", 1), ("--max-cpu-loras", 1)):
        parser.add_argument(flag, type=int, default=default)
    options, others = parser.parse_known_args()
    print("fake engine; other options:", others, flush=True)
    return options


def make_app(fake: Fake) -> web.Application:
    app = web.Application(client_max_size=64 << 20)
    app["fake"] = fake
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
    for (method, route), handler in routes.items():
        if fake.faults.get("no-route") != route:
            app.router.add_route(method, route, handler)
    return app


def main() -> None:
    options = parse()
    found = re.search(r"engine(\d+)\.sock$", options.uds)
    fake = Fake(options, faults(int(found[1]) if found else 1), 512)
    fake.journal("start", argv=sys.argv[1:], environment=dict(os.environ))
    if "dies-at-start" in fake.faults:
        sys.exit("Traceback (most recent call last):\nValueError: the fake engine does not like this model")
    if "port-clash" in fake.faults:
        sys.exit("OSError: [Errno 98] Address already in use")
    if "has-child" in fake.faults:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
        fake.journal("child", child=child.pid)
    if "never-listens" in fake.faults:
        time.sleep(3600)
    if "slow-start" in fake.faults:
        time.sleep(float(fake.faults["slow-start"]))
    handle_signals = "ignores-sigterm" not in fake.faults
    if not handle_signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    web.run_app(
        make_app(fake),
        path=options.uds,
        handle_signals=handle_signals,
        handler_cancellation=True,
        access_log=None,
        print=None,
        shutdown_timeout=0.5,
    )


if __name__ == "__main__":
    main()
