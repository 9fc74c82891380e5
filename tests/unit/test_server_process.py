"""The server half as the trainer starts it: from which environment, and what is left of it afterwards."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bridge import guard
from bridge.adopted import Adopted
from trainer_env.serving import server_process as module
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


def handles() -> list[str]:
    """Of processes, that this one has open."""
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The one that reads this folder.
            targets.append(str(path.readlink()))
    return [target for target in targets if "pidfd" in target]


def test_a_server_that_was_taken_over_and_has_been_stopped_leaves_no_handle(venvs, tmp_path):
    before, server = handles(), ServerProcess("vllm", tmp_path, {}, {})
    with subprocess.Popen(["/bin/sleep", "60"], start_new_session=True) as left:
        process = guard.living(left.pid)
        assert process
        server._child = Adopted.find(left.pid, process.started)
        assert len(handles()) == len(before) + 1
        assert server.stop() == "terminated"
        assert handles() == before
    assert server.taken_over
    assert not server.alive
    assert server.stop() == "gone"


@pytest.mark.parametrize("then", ["started", "kept"])
def test_a_kept_server_that_has_ended_since_is_collected_when_another_one_comes_or_goes(venvs, tmp_path, then):
    (venvs / "server-vllm-0" / "bin" / "tandem-server").write_text("#!/bin/sh\nexec sleep 60\n")

    def started(name: str) -> tuple[ServerProcess, int]:
        folder = tmp_path / name
        folder.mkdir()
        server = ServerProcess("vllm", folder, {}, {})
        server.start({})
        assert isinstance(server._child, subprocess.Popen)
        return server, server._child.pid

    def dead(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while guard.living(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    first, pid = started("one")
    if then == "kept":
        other, _ = started("two")
        first.let_go()
        dead(pid)
        other.let_go()
    else:
        first.let_go()
        dead(pid)
        other, _ = started("two")
    assert not Path(f"/proc/{pid}").exists()
    for child in (other._child, *module._kept):
        if isinstance(child, subprocess.Popen):
            child.kill()
            child.wait()
