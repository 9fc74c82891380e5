"""What the server is asked for: all of it is waited for, or nothing."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from bridge.protocol import Generate
from trainer_env.sampling.sampler import Asked


class Interrupted:
    """A server that nobody hears from; the third request to it is interrupted."""

    welcome = SimpleNamespace(log_path="", restart_s=0.0)

    def __init__(self) -> None:
        self.open: list[Future] = []

    def submit(self, _request):
        if len(self.open) == 2:
            raise KeyboardInterrupt
        self.open.append(Future())
        return self.open[-1]


def test_requests_whose_asking_is_interrupted_are_taken_back():
    server = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        Asked(server, [Generate(prompt=b"")] * 3)  # type: ignore[arg-type]
    assert [future.cancelled() for future in server.open] == [True, True]


class Unnoted(Future):
    """Comes when somebody looks for it, and whoever waits hears of it long before those that are called back."""

    def done(self):
        done = super().done()
        if not done:
            self.set_result("found")
        return done

    def add_done_callback(self, fn):
        pass


def test_an_answer_that_was_waited_for_has_come_when_the_waiting_ends():
    server = SimpleNamespace(welcome=SimpleNamespace(log_path="", restart_s=0.0), submit=lambda _: Unnoted())
    asked = Asked(server, [Generate(prompt=b"")])  # type: ignore[arg-type]
    assert asked.answers() == ["found"]
    assert asked.answered_at > asked.asked_at
