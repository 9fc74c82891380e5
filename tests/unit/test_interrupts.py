"""What Ctrl-C means to a run: the step's end, and then the end now; told to people who may be being told something."""

import signal
import threading

import pytest

from trainer_env.training.interrupts import Interrupts


def test_a_ctrl_c_in_the_middle_of_a_print_is_told_after_it():
    printing, said = threading.Lock(), []

    def say(text):
        if printing.acquire(timeout=0 if threading.current_thread() is threading.main_thread() else 30):
            printing.release()
            said.append(text)
        else:
            raise RuntimeError("reentrant call")

    interrupts = Interrupts(say)
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.interrupt())
    try:
        with interrupts.stoppable():
            with printing:
                signal.raise_signal(signal.SIGINT)
            assert interrupts.stop.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
    assert said == ["stopping after this step; once more to stop now"]


def test_the_second_one_ends_it_now():
    interrupts = Interrupts([].append)
    with interrupts.stoppable():
        interrupts.interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.interrupt()
    assert (interrupts.impatient, interrupts.ending) == (True, True)


def test_outside_of_training_the_first_one_ends_it_now():
    interrupts = Interrupts([].append)
    with interrupts.stoppable():
        pass
    with pytest.raises(KeyboardInterrupt):
        interrupts.interrupt()
    assert not interrupts.stop.is_set()
