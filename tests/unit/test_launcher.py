"""The launcher of several trainer processes: whoever it has started is dead when it returns, also interrupted."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_env import config as configs
from trainer_env.devices import Devices
from trainer_env.placement import plan
from trainer_env.ranks import launcher

DEAF = """
import os, signal, sys, time
def asked(*_):
    os.kill(os.getppid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, asked)
open(sys.argv[1], "w").close()
while True:
    time.sleep(60)
"""
"""What sits in a collective that nobody joins. It answers the request to end with a Ctrl-C for the launcher."""
FIRST = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.exit(130)
"""


@pytest.fixture(autouse=True)
def ctrl_c():
    """A test runner in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Who was started, and dies with the test."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def launched(started, monkeypatch, tmp_path):
    """Launches two processes of that source; after_start is called with the number of each that was started."""
    monkeypatch.chdir(Path(__file__).parents[2])

    def launch(*sources: str, after_start=lambda _: None):
        def start(rank, _ranks, _meeting, _words):
            words = [sys.executable, "-c", sources[rank], str(tmp_path / "ready")]
            started.append(subprocess.Popen(words, start_new_session=True))
            after_start(rank)
            return started[-1]

        monkeypatch.setattr(launcher, "_start", start)
        job = [f'output_dir="{tmp_path}"', 'run="run"', 'placement.mode="cpu"', "placement.trainer_ranks=2"]
        config = configs.load(Path("configs/demo.toml"), job)
        return launcher.launch(config, plan(config.placement, Devices(cores=2)), resume=False)

    return launch


def test_a_ctrl_c_while_the_others_are_asked_to_end_kills_them(launched, started, monkeypatch):
    monkeypatch.setattr(launcher, "GOODBYE_S", 3600.0)
    assert launched(FIRST, DEAF) == 130
    assert started[1].returncode == -signal.SIGKILL


def test_who_does_not_end_when_asked_is_killed(launched, started, monkeypatch):
    monkeypatch.setattr(launcher, "GOODBYE_S", 0.2)
    assert launched(FIRST, DEAF.replace("os.kill(os.getppid(), signal.SIGINT)", "pass")) == 130
    assert started[1].returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [0, 1])
def test_a_ctrl_c_between_two_starts_ends_who_was_started(launched, started, number):
    def interrupt(rank):
        if rank == number:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        launched("import time; time.sleep(3600)", "import time; time.sleep(3600)", after_start=interrupt)
    assert started
    assert all(process.returncode is not None for process in started)
