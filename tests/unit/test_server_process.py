"""The server half as the trainer starts it: from which environment."""

import pytest

from trainer_env.serving.server_process import ServerProcess


@pytest.fixture
def venvs(tmp_path, monkeypatch):
    """Two builds of an environment, whose tandem-server says its build's name; switched to the first."""
    for build in ("server-vllm-0", "server-vllm-1"):
        program = tmp_path / build / "bin" / "tandem-server"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho {build}\n")
        program.chmod(0o755)
    (tmp_path / "server-vllm").symlink_to("server-vllm-0")
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path))
    return tmp_path


def test_a_run_keeps_its_engine_when_another_build_is_switched_to(venvs, tmp_path):
    server = ServerProcess("vllm", tmp_path, {}, {})
    (venvs / "server-vllm").unlink()
    (venvs / "server-vllm").symlink_to("server-vllm-1")
    assert server.check() == "server-vllm-0"
    assert ServerProcess("vllm", tmp_path, {}, {}).check() == "server-vllm-1"
