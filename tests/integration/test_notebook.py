"""Cells of a notebook, in a real kernel, whose event loop runs while each of them does."""

import asyncio
from collections.abc import Iterator

import pytest
from jupyter_client.manager import run_kernel

from served import served, tiny_model, until

CONNECT = """
import asyncio
from pathlib import Path
from bridge import protocol as p
from bridge.blocking import BlockingClient
from bridge.endpoint import read_connection

assert asyncio.get_running_loop().is_running()
client = BlockingClient.connect(read_connection(Path({path!r})), run_id="run")
question = p.Generate(prompt=p.pack_ids([5, 6, 7, 8]), deadline_s=60)
"""
ASK = "print('version', client.ask(question).version)"


class Notebook:
    """A kernel; run gives what a cell printed, or the text of its error."""

    def __init__(self, client) -> None:
        self._client = client

    async def run(self, cell: str) -> str:
        shown: list[str] = []

        def note(message) -> None:
            content = message["content"]
            shown.append(content.get("text") or "\n".join(content.get("traceback", [])))

        await asyncio.to_thread(self._client.execute_interactive, cell, timeout=90, output_hook=note)
        return "".join(shown)


@pytest.fixture
def notebook(tmp_path, monkeypatch) -> Iterator[Notebook]:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    with run_kernel(kernel_name="python3", startup_timeout=90) as client:
        yield Notebook(client)


async def test_cells_ask_although_the_kernels_loop_runs_and_say_why_a_server_is_gone(tmp_path, notebook):
    gate = tmp_path / "gate"
    gate.touch()
    async with served(tmp_path, tiny_model(tmp_path / "model"), fault=f"holds:{gate}") as server:
        path = str(server.connection_path)
        assert await notebook.run(CONNECT.format(path=path)) == ""
        assert await notebook.run(ASK) == "version 0\n"
        gate.unlink()
        asking = asyncio.create_task(notebook.run(ASK))
        await until(lambda: len(server.journal("asked")) == 2, "the second request to reach the engine")
        server.note_family()
        server.process.kill()
        async with asyncio.timeout(90):
            error = await asking
        assert "PeerDied" in error
        assert f"tandem-server (pid {server.process.pid}) is gone" in error
        assert (server.run_dir / "server.log").read_text().splitlines()[-1] in error
        await notebook.run("client.close()")
