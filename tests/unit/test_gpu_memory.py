"""How much GPU memory sleep gives back is measured, not believed."""

import os
from typing import Any

import pytest

from server_env.gpu_memory import used_bytes
from server_env.sleeping import Sleeper

NVIDIA_SMI = """#!/bin/sh
echo "$@" > "{folder}/asked"
cat "{folder}/used"
"""
MIB = 1 << 20


@pytest.fixture
def driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


class Engines:
    """They say that they sleep; what that does to the memory in use is another matter."""

    class facts:  # noqa: N801 (as Replicas has it)
        capabilities = frozenset({"sleep"})

    def __init__(self, used, after):
        self._used, self._after = used, after

    async def turn(self, level):
        if level == "asleep":
            self._used.write_text(self._after)


async def test_it_is_the_sum_over_the_gpus_that_this_process_may_see(driver, monkeypatch):
    (driver / "used").write_text("100\n[N/A]\n23\n")
    assert await used_bytes() == 123 * MIB
    assert "--id" not in (driver / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    await used_bytes()
    assert "--id=1,3" in (driver / "asked").read_text()


@pytest.mark.parametrize(("after", "freed"), [("300", 700), ("1000", 0), ("1100", 0)])
async def test_sleep_says_how_much_is_free_again_and_nothing_when_nothing_is(driver, after, freed):
    used = driver / "used"
    used.write_text("1000")
    engines: Any = Engines(used, after)
    assert (await Sleeper(engines).sleep()).freed_bytes == freed * MIB
