"""Somebody else's process, watched and ended: that one and no other."""

import signal
import subprocess
import sys

import pytest

from bridge import guard
from bridge.adopted import Adopted

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"


@pytest.fixture
def sleeper():
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


def find(process):
    living = guard.living(process.pid)
    assert living
    return Adopted.find(process.pid, living.started)


def test_a_process_is_found_by_its_pid_and_its_start(sleeper):
    adopted = find(sleeper)
    assert adopted
    assert adopted.pid == sleeper.pid
    assert adopted.poll() is None
    assert not adopted.ended(0.01)


def test_another_process_with_that_pid_is_not_it(sleeper):
    living = guard.living(sleeper.pid)
    assert living
    assert Adopted.find(sleeper.pid, living.started - 1) is None


def test_a_dead_process_is_not_found_whether_it_was_collected_or_not(sleeper):
    living = guard.living(sleeper.pid)
    assert living
    adopted = find(sleeper)
    assert adopted
    sleeper.kill()
    assert adopted.ended(10)
    assert Adopted.find(sleeper.pid, living.started) is None
    sleeper.wait()
    assert Adopted.find(sleeper.pid, living.started) is None


def test_it_ends_with_a_word(sleeper):
    adopted = find(sleeper)
    assert adopted
    assert adopted.stop(10, 10) == "terminated"
    assert adopted.poll() == 0
    assert adopted.stop(10, 10) == "gone"


def test_one_that_does_not_listen_is_killed():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout
        deaf.stdout.readline()
        adopted = find(deaf)
        assert adopted
        assert adopted.stop(0.1, 10) == "killed"
        adopted.close()


def test_a_stopped_process_lives(sleeper):
    adopted = find(sleeper)
    assert adopted
    sleeper.send_signal(signal.SIGSTOP)
    assert not adopted.ended(0.05)


def test_one_that_is_let_go_of_counts_as_ended_and_is_left_alone(sleeper):
    adopted = find(sleeper)
    assert adopted
    for _ in range(2):
        adopted.close()
    assert adopted.poll() == 0
    assert adopted.stop(10, 10) == "gone"
    assert sleeper.poll() is None
