"""One engine on two nodes, both on this machine: the first answers the trainer, the other only runs its part."""

import contextlib
import json
import os
import signal
import socket

import pytest

import lora_files
from bridge import protocol as p
from served import PATIENT, generate, served, until

pytestmark = pytest.mark.usefixtures("backend")

PROMPT = [5, 6, 7, 8]


@pytest.fixture
def nodes(tmp_path):
    """[server] of both."""
    with socket.socket() as held:  # Nobody else is given the port; who asks for it by number can listen there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        yield {"nnodes": 2, "tensor_parallel": 2, "dist_init_addr": address, "spool_dir": str(tmp_path / "spool")}


@contextlib.asynccontextmanager
async def first_and_second(tmp_path, model, nodes, **options):
    folder = tmp_path / "second"
    folder.mkdir()
    second = served(folder, model, server=nodes, arguments=("--node-rank", "1"), wait=False, **options)
    async with second as further, served(tmp_path, model, server=nodes, wait=False) as first:
        await first.ready()
        further.note_family()
        yield first, further


async def test_the_second_node_runs_its_part_and_the_first_one_answers(tmp_path, model, nodes, backend):
    async with first_and_second(tmp_path, model, nodes) as (first, second):
        client = await first.client("run")
        adapter = lora_files.make(model, 1)
        await client.ask(adapter.publish(1), adapter.data)
        assert (await client.ask(generate(PROMPT))).version == 1
        argv = second.journal("start")[0]["argv"]
        assert argv[argv.index("--node-rank") + 1] == "1"
        assert ("--headless" in argv) is (backend == "vllm")
        assert "runs node 1" in (second.run_dir / "output.log").read_text()
        assert not list(second.run_dir.rglob("connection.json"))
        assert (second.run_dir / "node-1" / "engine.log").exists()
        second.process.send_signal(signal.SIGTERM)
        assert await second.exited() == 0
        await second.gone()


async def test_when_one_nodes_part_dies_both_start_again_and_meet_anew(tmp_path, model, nodes):
    async with first_and_second(tmp_path, model, nodes) as (first, second):
        client = await first.client("run")
        os.kill(second.journal("joined")[0]["pid"], signal.SIGKILL)
        await until(lambda: len(first.journal("met")) == 2, "both to meet again")
        assert (await client.ask(generate(PROMPT, deadline_s=200))).completions
        os.kill((await client.ask(p.Status())).engine_pid, signal.SIGKILL)
        assert (await client.ask(generate(PROMPT, deadline_s=200))).completions
        assert (await client.ask(p.Status())).restarts == 2
        second.note_family()


async def test_a_node_whose_part_does_not_start_gives_up_with_its_log(tmp_path, model, nodes):
    rank = ("--node-rank", "1")
    async with served(tmp_path, model, server=nodes, arguments=rank, fault="dies-at-start", wait=False) as node:
        assert await node.exited() == 1
        assert len(node.journal("start")) == 4
        failure = json.loads((node.run_dir / "node-1" / "server_failure.json").read_text())
        assert failure["why"] == "ValueError: the fake engine does not like this model"
        assert failure["log_path"].endswith("node-1/engine.log")


async def test_a_stubborn_part_is_killed_at_the_second_signal(tmp_path, model, nodes):
    rank = ("--node-rank", "1")
    fault = "ignores-sigterm,has-child,never-listens"
    how = {"arguments": rank, "fault": fault, "program": PATIENT}
    async with served(tmp_path, model, server=nodes, wait=False, **how) as node:
        await until(lambda: node.journal("child"), "the node's part to start")
        node.note_family()
        node.process.send_signal(signal.SIGTERM)
        node.process.send_signal(signal.SIGINT)
        assert await node.exited() == 0
        await node.gone()


async def test_a_rank_that_does_not_exist_is_an_error(tmp_path, model, nodes):
    async with served(tmp_path, model, server=nodes, arguments=("--node-rank", "2"), wait=False) as node:
        assert await node.exited() == 2
        assert "there is no node 2 of 2" in (node.run_dir / "output.log").read_text()
