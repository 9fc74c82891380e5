"""Who may use a server, how long it waits for them, and how people reach it: leases, tcp, HTTP, the command."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest

from bridge import client as client_module
from bridge import protocol as p
from bridge.endpoint import read_connection
from bridge.errors import Refused, StaleVersion, Timeout
from served import FAKE, PROGRAM, generate, publish, served, until, write_config

PROMPT = [5, 6, 7, 8]


# ---- the lease -------------------------------------------------------------------------------------------------------


async def test_a_server_whose_trainer_falls_silent_ends_and_one_with_a_heartbeat_does_not(tmp_path, model, monkeypatch):
    monkeypatch.setattr(client_module, "LEASE_FRACTION", 50)
    async with served(tmp_path, model, lease_s=6.0) as server:
        client = await server.client("run")
        assert client.welcome.lease_s == 6.0
        heard_until = time.monotonic() + 8
        await until(lambda: time.monotonic() > heard_until, "eight seconds of heartbeats")
        assert server.process.poll() is None
        await client.close()
        server.note_family()
        assert await server.exited() == 0
        assert "has been silent" in (server.run_dir / "server.log").read_text()


async def test_a_server_that_nobody_comes_to_ends(tmp_path, model):
    async with served(tmp_path, model, attach_within_s=1.0, wait=False) as server:
        assert await server.exited() == 0
        assert "no trainer came" in (server.run_dir / "server.log").read_text()


async def test_a_server_waits_for_the_trainer_that_started_it_as_long_as_that_lives(tmp_path, model):
    trainer = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220 (it takes no time)
    starter = ("--trainer", str(trainer.pid))
    try:
        async with served(tmp_path, model, lease_s=0.5, attach_within_s=0.5, arguments=starter) as server:
            waited_until = time.monotonic() + 4
            await until(lambda: time.monotonic() > waited_until, "many times attach_within_s")
            assert server.process.poll() is None
            trainer.kill()
            assert await server.exited(15) == 0
            assert "no trainer came within 0.5 s" in (server.run_dir / "server.log").read_text()
    finally:
        trainer.kill()
        trainer.wait()


async def test_a_kept_server_outlives_its_trainer_and_takes_the_same_run_back(tmp_path, model):
    async with served(tmp_path, model, lease_s=0.5, keep_server_s=600.0) as server:
        first = await server.client("run")
        await publish(first, model, 14)
        await first.close()
        again = await attach_again(server, first)
        assert again.welcome.version == 14
        assert (await publish(again, model, 10)).version == 10
        assert (await again.ask(generate(PROMPT))).version == 10
        with pytest.raises(StaleVersion):
            await publish(again, model, 9)


async def attach_again(server, before):
    """Say hello as the run "run" when the lease of a client that is closed has run out: under another epoch."""
    for _ in range(90):
        await asyncio.sleep(1)  # Each hello renews a lease that has not.
        client = await server.client("run")
        if client.welcome.epoch > before.welcome.epoch:
            return client
        await client.close()
    pytest.fail("the lease has not run out")


async def test_a_second_run_is_refused_while_the_first_one_lives_and_then_begins_anew(tmp_path, model):
    async with served(tmp_path, model, lease_s=6.0, keep_server_s=600.0) as server:
        first = await server.client("one")
        await publish(first, model, 5)
        with pytest.raises(Refused, match=r"Run 'one' .* holds this server"):
            await server.client("two")
        onlooker = await server.client()
        assert (onlooker.welcome.epoch, onlooker.welcome.version) == (0, 5)
        assert (await onlooker.ask(generate(PROMPT))).version == 5
        for request in (p.Shutdown(), p.Sleep(), p.Wake()):
            with pytest.raises(Refused, match="an onlooker may ask it, and not change it"):
                await onlooker.ask(request)
        with pytest.raises(Refused, match="an onlooker"):
            await publish(onlooker, model, 6)
        await first.close()
        deadline = time.monotonic() + 90
        second = None
        while second is None:
            assert time.monotonic() < deadline
            try:
                second = await server.client("two")
            except Refused:
                await asyncio.sleep(0.1)
        assert (second.welcome.epoch, second.welcome.version) == (2, 0)
        with pytest.raises(Refused, match="run_id"):
            await onlooker.ask(p.Lease())
        loaded = await publish(second, model, 5)
        assert loaded.name == "policy-v000005-2"


async def test_messages_of_an_older_epoch_are_refused(tmp_path, model):
    async with served(tmp_path, model, lease_s=0.5, keep_server_s=600.0) as server:
        old = await server.client("run")
        epoch = old.welcome.epoch
        await old.close()
        new = await attach_again(server, old)
        new._epoch = epoch
        for request in (generate(PROMPT), p.Lease(), p.Shutdown()):
            with pytest.raises(Refused, match="taken this server over"):
                await new.ask(request)


async def test_a_server_of_one_run_admits_no_other(tmp_path, model):
    async with served(tmp_path, model, run_id="mine") as server:
        with pytest.raises(Refused, match="belongs to run 'mine'"):
            await server.client("yours")
        assert (await server.client("mine")).welcome.epoch == 1


# ---- sleep -----------------------------------------------------------------------------------------------------------

ASLEEP = {"device": "cuda", "sleep": True}


async def test_sleep_waits_for_what_is_in_flight_and_holds_what_comes(tmp_path, model, backend):
    gate = tmp_path / "gate"
    async with served(tmp_path, model, fault=f"holds:{gate}", server=ASLEEP) as server:
        client = await server.client("run")
        assert "sleep" in client.welcome.capabilities
        running = asyncio.create_task(client.ask(generate(PROMPT)))
        await until(lambda: server.journal("asked"), "the request to reach the engine")
        sleeping = asyncio.create_task(client.ask(p.Sleep()))
        await client.ask(p.Ping())
        assert not server.journal("sleep")
        gate.touch()
        await running
        assert isinstance(await sleeping, p.Slept)
        waiting = asyncio.create_task(client.ask(generate(PROMPT)))
        await publish(client, model, 1)
        await client.ask(p.Ping())
        assert not waiting.done()
        await client.ask(p.Wake())
        assert (await waiting).version == 1
        order = [
            e["event"] + "".join(e.get("tags", [])) for e in server.journal() if e["event"] in ("sleep", "wake", "load")
        ]
        slept = {"vllm": ["sleep", "wakeweights"], "sglang": ["sleepkv_cache"]}  # SGLang's weights stay where they are.
        assert order == [*slept[backend], "load", "wakekv_cache"]
        assert not server.journal("generated-asleep")


async def test_an_engine_that_woke_for_an_adapter_sleeps_again_when_it_is_told_to(tmp_path, model, backend):
    async with served(tmp_path, model, server=ASLEEP) as server:
        client = await server.client("run")
        for version in (1, 2):
            await client.ask(p.Sleep())
            await publish(client, model, version)
        await client.ask(p.Sleep())
        slept = [entry["event"] for entry in server.journal() if entry["event"] in ("sleep", "wake")]
        again = {"vllm": ["wake", "wake", "sleep"], "sglang": ["wake", "sleep"]}  # The weights, the KV cache, both.
        assert slept == ["sleep", *2 * again[backend]]
        waiting = asyncio.create_task(client.ask(generate(PROMPT)))
        await client.ask(p.Ping())
        assert not waiting.done()
        await client.ask(p.Wake())
        assert (await waiting).version == 2
        assert not server.journal("generated-asleep")


async def test_an_engine_that_cannot_sleep_says_so(tmp_path, model):
    async with served(tmp_path, model) as server:
        with pytest.raises(Refused, match="cannot sleep"):
            await (await server.client()).ask(p.Sleep())


async def test_a_kept_server_sleeps_until_its_trainer_is_back(tmp_path, model, backend):
    async with served(tmp_path, model, server=ASLEEP, lease_s=0.5, keep_server_s=600.0) as server:
        first = await server.client("run")
        await first.close()
        await until(lambda: server.journal("sleep"), "the engine to sleep")
        again = await server.client("run")
        assert (await again.ask(generate(PROMPT))).completions


# ---- tcp -------------------------------------------------------------------------------------------------------------


async def test_over_tcp_the_connection_file_is_the_key(tmp_path, model):
    async with served(tmp_path, model, arguments=("--listen", "tcp://127.0.0.1:0")) as server:
        connection = read_connection(server.connection_path)
        assert connection.data.startswith("tcp://127.0.0.1:")
        assert server.connection_path.stat().st_mode & 0o777 == 0o600
        assert (await (await server.client("run")).ask(generate(PROMPT))).completions
        secrets = (connection.client_secret, connection.server_key)
        assert all(secrets)
        assert connection.client_secret not in server.log()


async def test_over_tcp_a_frame_is_no_larger_than_the_models_largest_adapter(tmp_path, model):
    async with served(tmp_path, model, arguments=("--listen", "tcp://127.0.0.1:0")) as server:
        client = await server.client("run")
        largest = client.welcome.limits.max_adapter_bytes
        assert p.MAX_DATA_BYTES < largest < 2 * p.MAX_DATA_BYTES
        await publish(client, model, 1, rank=8)
        too_big = p.PublishAdapter(version=2, digest="", adapter_config={})
        with pytest.raises(Refused, match=rf"has {largest + 1} bytes; the server takes {largest}\."):
            await client.ask(too_big, bytes(largest + 1))
        with pytest.raises(Refused, match="has no rank"):
            await client.ask(too_big, bytes(largest))
        client._control.max_bytes, client._restart_s = 2 * largest, 0.0  # One that does not keep to it.
        with pytest.raises(Timeout):
            await client.ask(msgspec.structs.replace(too_big, deadline_s=1.0), bytes(2 * largest))


async def test_over_tcp_an_adapter_of_an_unknown_model_may_be_as_large_as_any(tmp_path, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mixture"}))
    async with served(tmp_path, model, arguments=("--listen", "tcp://127.0.0.1:0")) as server:
        assert (await server.client("run")).welcome.limits.max_adapter_bytes == p.MAX_CONTROL_BYTES


# ---- HTTP for people -------------------------------------------------------------------------------------------------


async def test_people_get_the_openai_api_and_metrics_but_nothing_that_changes_the_engine(tmp_path, model):
    async with served(tmp_path, model, http="127.0.0.1:0", server=ASLEEP) as server:
        client = await server.client("run")
        await publish(client, model, 3)
        url = client.welcome.http_url
        async with aiohttp.ClientSession(url) as http:
            listed = await (await http.get("/v1/models")).json()
            assert {m["id"] for m in listed["data"]} == {"base", "policy-v000003"}
            ask = {
                "model": "policy-v000003",
                "prompt": PROMPT,
                "max_tokens": 3,
                "temperature": 1.0,
                "return_token_ids": True,
            }
            answer = await (await http.post("/v1/completions", json=ask)).json()
            assert answer["choices"][0]["token_ids"]
            assert (await http.post("/v1/completions", json=ask | {"model": "none"})).status == 404
            metrics = await (await http.get("/metrics")).text()
            assert "tandem_adapter_version 3.0" in metrics
            assert "vllm:generation_tokens_total" in metrics
            for route in ("/sleep?level=1", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/collective_rpc"):
                assert (await http.post(route, json={})).status == 404


async def test_people_need_no_key_and_reach_an_engine_that_has_one(tmp_path, model):
    async with served(tmp_path, model, http="127.0.0.1:0", server={"backend": "sglang"}) as server:
        client = await server.client("run")
        await publish(client, model, 3)
        async with aiohttp.ClientSession(client.welcome.http_url) as http:
            for headers in ({}, {"Authorization": "Bearer EMPTY"}):
                async with http.get("/v1/models", headers=headers) as answer:
                    assert {m["id"] for m in (await answer.json())["data"]} == {"model", "policy-v000003"}
            for route in ("/generate", "/load_lora_adapter", "/abort_request", "/release_memory_occupation"):
                assert (await http.post(route, json={})).status == 404


async def test_keys_are_in_no_argument_no_variable_no_log_and_no_file(tmp_path, model):
    """The fake engine prints its keys, as SGLang does; that they once were there shows in what was written over."""
    async with served(tmp_path, model, server={"backend": "sglang"}) as server:
        await server.client("run")
        start = server.journal("start")[0]
        assert not {"--api-key", "--admin-api-key"} & set(start["argv"])
        assert not Path(start["argv"][start["argv"].index("--config") + 1]).exists()
        log = (server.run_dir / "engine.log").read_text()
        assert "'api-key': '" + "*" * 64 in log
        assert "'admin-api-key': '" + "*" * 64 in log
        assert not any("key" in name.lower() for name in start["environment"].keys() - os.environ.keys())


async def test_without_being_asked_no_port_is_open(tmp_path, model):
    async with served(tmp_path, model) as server:
        assert (await server.client()).welcome.http_url == ""


# ---- the command -----------------------------------------------------------------------------------------------------


def run(*arguments):
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False)


SLOW_TO_IMPORT = ("asyncio", "aiohttp", "msgspec", "zmq")


def test_help_is_quick_and_needs_no_configuration():
    code = f"""
import atexit, sys
from server_env.cli import main
atexit.register(lambda: print([name for name in {SLOW_TO_IMPORT} if name in sys.modules]))
sys.exit(main(["--help"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert done.stdout.endswith("\n[]\n")
    assert "--check" in done.stdout


def test_check_prints_the_engines_command_line_and_starts_nothing(tmp_path, model):
    config = write_config(
        tmp_path / "server.toml", {"server": {"model": str(model), "engine_command": FAKE, "seed": 3}}
    )
    done = run("--config", str(config), "--check", "--set", "vllm.max_num_seqs=7")
    assert done.returncode == 0, done.stderr
    assert f"--model {model} --seed 3" in done.stdout
    assert "--max-num-seqs 7" in done.stdout


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"server": {"modle": "x"}}, "server.model"),
        ({"server": {}}, "server.model: is missing"),
        ({"server": {"model": "x", "adapter_slots": 2}}, "server.adapter_slots"),
        ({"server": {"model": "x", "max_lora_rank": 1000}}, "ranks up to 512"),
        ({"server": {"model": "x"}, "vllm": {"logprobs_mode": "raw_logprobs"}}, "vllm.logprobs_mode"),
        ({"server": {"model": "x", "listen": "udp://1"}}, "server.listen"),
        ({"server": {"model": "x", "sleep": True, "device": "cpu"}}, "sleep"),
    ],
)
def test_a_wrong_configuration_is_exit_code_2_and_a_failure_file(tmp_path, data, named):
    data["server"].setdefault("engine_command", FAKE)
    config = write_config(tmp_path / "server.toml", data)
    done = run("--config", str(config), "--run-dir", str(tmp_path), "--check")
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    failure = json.loads((tmp_path / "server_failure.json").read_text())
    assert failure["code"] == "config"


async def test_two_servers_in_one_run_directory_are_an_error(tmp_path, model):
    async with served(tmp_path, model) as server:
        config = str(tmp_path / "server.toml")
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "--config", config, "--run-dir", str(server.run_dir), stderr=asyncio.subprocess.PIPE
        )
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert b"already serves" in stderr
        assert server.connection_path.exists()
        assert (await (await server.client()).ask(generate(PROMPT))).completions


async def test_two_servers_of_one_kind_at_once_do_not_meet(tmp_path, model):
    (tmp_path / "b").mkdir()
    shared = {"TANDEM_CACHE": str(tmp_path / "cache")}
    async with (
        served(tmp_path, model, environment=shared) as one,
        served(tmp_path / "b", model, environment=shared) as two,
    ):
        for server, version in ((one, 1), (two, 2)):
            client = await server.client("run")
            await publish(client, model, version)
        for server, version in ((one, 1), (two, 2)):
            assert (await (await server.client()).ask(generate(PROMPT))).version == version
        caches = {server.journal("start")[0]["environment"]["VLLM_CACHE_ROOT"] for server in (one, two)}
        assert len(caches) == 2


async def test_the_engine_gets_a_cleaned_environment(tmp_path, model):
    dirty = {
        "PYTHONPATH": "/nowhere",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64",
        "RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "7",
        "KEPT": "yes",
    }
    async with served(tmp_path, model, environment=dirty, server={"engine_env": {"MINE": "1"}}) as server:
        seen = server.journal("start")[0]["environment"]
        assert (
            not {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "RANK", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}
            & seen.keys()
        )
        assert seen["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64"
        assert (seen["KEPT"], seen["MINE"]) == ("yes", "1")
