"""One /metrics page: its figures are right, it is there whatever the engine does, and only for whom it is meant."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import pytest

import lora_files
from bridge import protocol as p
from bridge.endpoint import how_to_read
from bridge.errors import Refused
from metrics_reader import read, read_until, session_of
from served import generate, publish, score, served

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]
NATIVE = {"vllm": "vllm:generation_tokens_total", "sglang": "sglang:generation_tokens_total"}


async def test_the_page_counts_what_was_asked_and_answered(tmp_path, model, backend):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        before = await read(server)
        loaded = await publish(client, model, 3)
        sampled = await client.ask(generate(PROMPT, n=2, max_tokens=4, ignore_eos=True))
        await client.ask(score([*PROMPT, 9]))
        with pytest.raises(Refused):
            await client.ask(generate([]))
        page = await read(server)
        tokens = sum(len(completion.token_ids) // 4 for completion in sampled.completions)
        assert tokens == 8
        assert page.value("tandem_generated_tokens_total") == tokens
        assert page.value(NATIVE[backend]) - before.value(NATIVE[backend]) >= tokens
        assert page.value("tandem_prompt_tokens_total") == 4 + 5
        assert page.value("tandem_adapter_version") == 3
        assert page.value("tandem_adapter_versions_loaded") == 1
        assert page.value("tandem_adapter_published_bytes_total") == loaded.nbytes
        assert page.value("tandem_adapter_load_seconds_count") == 1
        assert page.value("tandem_adapter_load_seconds_sum") == pytest.approx(loaded.load_s)
        assert page.value("tandem_adapter_spool_seconds_sum") == pytest.approx(loaded.spool_s)
        for kind, outcome, count in (
            ("publish", "ok", 1),
            ("generate", "ok", 1),
            ("generate", "refused", 1),
            ("score", "ok", 1),
            ("sleep", "ok", 0),
        ):
            assert page.value("tandem_requests_total", kind=kind, outcome=outcome) == count
        assert page.value("tandem_request_seconds_count", kind="generate") == 1
        assert page.value("tandem_engine_ready", engine="0") == 1
        assert page.value("tandem_engine_restarts_total", engine="0") == 0
        assert page.value("tandem_server_info", backend=backend, run="run") == 1
        assert 0 < before.value("tandem_uptime_seconds") < page.value("tandem_uptime_seconds")


async def test_a_repeated_publish_is_counted_once_and_an_alias_loads_nothing(tmp_path, model):
    async with served(tmp_path, model) as server:
        client = await server.client("run")
        adapter = lora_files.make(model, 1)
        for version in (1, 1, 2):
            await client.ask(adapter.publish(version), adapter.data)
        page = await read(server)
        assert page.value("tandem_adapter_load_seconds_count") == 1
        assert page.value("tandem_adapter_published_bytes_total") == 2 * len(adapter.data)


async def test_requests_show_while_they_wait_and_while_they_run(tmp_path, model):
    hold = tmp_path / "go"
    async with served(tmp_path, model, fault=f"holds:{hold}") as server:
        client = await server.client("run")
        asked = [
            asyncio.create_task(client.ask(ask))
            for ask in (generate(PROMPT), generate(PROMPT), generate(PROMPT, min_version=7))
        ]
        await read_until(server, lambda page: page.value("tandem_requests_waiting", reason="version") == 1)
        page = await read_until(server, lambda page: page.value("tandem_requests_in_flight") == 2)
        assert page.value("tandem_requests_waiting", reason="version") == 1
        assert page.value("tandem_requests_waiting", reason="engine") == 0
        hold.touch()
        await publish(client, model, 7)
        await asyncio.gather(*asked)
        page = await read(server)
        assert page.value("tandem_requests_in_flight") == page.value("tandem_requests_waiting") == 0


async def test_a_request_that_is_cancelled_is_counted_as_such(tmp_path, model):
    async with served(tmp_path, model, fault="hangs") as server:
        client = await server.client("run")
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        await read_until(server, lambda page: page.value("tandem_requests_in_flight") == 1)
        asking.cancel()
        page = await read_until(server, lambda page: page.value("tandem_requests_in_flight") == 0)
        assert page.value("tandem_requests_total", kind="generate", outcome="cancelled") == 1


async def test_requests_wait_while_the_engine_sleeps_and_its_turning_is_timed_once(tmp_path, model):
    asleep = {"sleep": True, "device": "cuda"}
    async with served(tmp_path, model, server=asleep) as server:
        client = await server.client("run")
        for _ in range(2):
            await client.ask(p.Sleep())
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        page = await read_until(server, lambda page: page.value("tandem_requests_waiting", reason="wake") == 1)
        assert page.value("tandem_engine_asleep") == 1
        for _ in range(2):
            await client.ask(p.Wake())
        await asking
        page = await read(server)
        assert page.value("tandem_engine_asleep") == 0
        assert page.value("tandem_engine_sleep_seconds_count") == page.value("tandem_engine_wake_seconds_count") == 1


async def test_while_the_engine_is_down_our_own_half_answers(tmp_path, model, backend):
    back_up = tmp_path / "back-up"
    async with served(tmp_path, model, fault=f"starts-when:{back_up}@2") as server:
        client = await server.client("run")
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        down = await read_until(server, lambda page: page.value("tandem_engine_ready") == 0)
        assert NATIVE[backend] not in down.names
        back_up.touch()
        back = await read_until(server, lambda page: page.value("tandem_engine_ready") == 1)
        assert back.value("tandem_engine_restarts_total") == 1
        assert NATIVE[backend] in back.names


async def test_an_engine_that_hangs_does_not_hold_the_page_up(tmp_path, model, backend):
    async with served(tmp_path, model, fault="freezes") as server:
        client = await server.client("run")
        asking = asyncio.create_task(client.ask(generate(PROMPT)))
        await read_until(server, lambda _: bool(server.journal("asked")))
        page = await read(server)
        assert NATIVE[backend] not in page.names
        assert page.value("tandem_requests_in_flight") == 1
        asking.cancel()


async def test_an_engine_that_keeps_no_figures_leaves_ours_valid(tmp_path, model):
    async with served(tmp_path, model, fault="no-route:/metrics") as server:
        assert {name.partition("_")[0] for name in (await read(server)).names} == {"tandem"}


async def test_unless_told_the_page_is_on_a_socket_that_nobody_else_can_open(tmp_path, model):
    async with served(tmp_path, model) as server:
        url = server.connection.metrics_url
        assert url == (await server.client()).welcome.metrics_url
        kind, _, path = url.partition(":")
        assert kind == "unix"
        assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
        assert f"metrics: {how_to_read(url)}\n" in server.log()


async def test_a_port_for_prometheus_has_metrics_and_no_api(tmp_path, model):
    async with served(tmp_path, model, arguments=("--metrics-address", "127.0.0.1:0")) as server:
        url = server.connection.metrics_url
        assert url.startswith("http://127.0.0.1:")
        assert f"metrics: curl {url}/metrics\n" in server.log()
        assert server.connection.http_url == ""
        async with session_of(url) as http:
            for route in ("/v1/models", "/v1/completions", "/health"):
                assert (await http.get(route)).status == 404
            assert (await http.post("/metrics")).status == 405
        assert (await read(server)).value("tandem_engine_ready") == 1


async def test_the_page_can_be_nowhere(tmp_path, model):
    async with served(tmp_path, model, metrics_address="") as server:
        assert server.connection.metrics_url == ""
        assert "metrics:" not in (server.run_dir / "output.log").read_text()
