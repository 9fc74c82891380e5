"""A moment without signals: they come when it is over, once, to whoever handled them before."""

import signal
import threading

import pytest

from trainer_env.serving.held_signals import held_signals


@pytest.fixture
def handled():
    """What came to this process's handlers."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda signum, _: came.append(signum)) for number in numbers}
    yield came
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_waits_for_the_end(handled):
    with held_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert handled == []
    assert handled == [signal.SIGTERM, signal.SIGINT]
    signal.raise_signal(signal.SIGINT)
    assert handled[2:] == [signal.SIGINT]


def test_what_the_block_raises_is_raised(handled):
    @held_signals()
    def fails():
        signal.raise_signal(signal.SIGINT)
        raise OSError("no such")

    with pytest.raises(OSError, match="no such"):
        fails()
    assert handled == [signal.SIGINT]


def test_a_signal_that_is_ignored_stays_ignored(handled):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_signals():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_holds_nothing(handled):
    handler, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with held_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]
