"""In time-share the server sleeps but for its turn, and is asked nothing while it does; an adapter may come then."""

from concurrent.futures import Future
from typing import Any

import pytest

from bridge.errors import Refused
from bridge.protocol import PublishAdapter, Sleep, Slept, Wake
from trainer.hf_server import HFServer
from trainer_env.serving.turns import Turned, Turns


class SleepsInTurns(HFServer):
    """Says how it was woken, put to sleep and asked, in order."""

    def __init__(self, model_path: str) -> None:
        super().__init__(model_path)
        self.asleep = False
        self.order: list[str] = []

    def submit(self, request: Any, buffer: Any = None) -> Future[Any]:
        self.order.append(type(request).__name__)
        if not isinstance(request, Sleep | Wake):
            assert isinstance(request, PublishAdapter) or not self.asleep
            return super().submit(request, buffer)
        assert self.asleep or isinstance(request, Sleep) or "Sleep" not in self.order
        self.asleep = isinstance(request, Sleep)
        future: Future[Any] = Future()
        future.set_result(Slept(seconds=0.0, freed_bytes=7 << 30 if self.asleep else 0))
        return future


def test_a_run_asks_in_the_servers_turn_only_and_its_steps_say_what_the_turns_took(train, tiny):
    server, room = SleepsInTurns(tiny), []
    ran = train("grpo.max_steps=3", server=server, turns=Turns(server, release=lambda: room.append(len(server.order))))
    turns = [word for word in server.order if word in ("Wake", "Sleep", "PublishAdapter")]
    assert turns == ["Wake", "Sleep", "PublishAdapter"] * 3
    for step in ran.steps:
        assert step.freed_bytes == 7 << 30
        assert step.sleep_s is not None
        assert step.wake_s is not None
        assert step.sleep_s + step.wake_s < step.rollout_s + step.train_s
    # Before each wake and before each publish the trainer gave back what it could.
    assert [server.order[place] for place in room] == ["Wake", "PublishAdapter"] * 3


def test_between_steps_on_one_batch_the_server_goes_back_to_sleep(train, tiny):
    """A publish wakes it as far as an adapter needs."""
    server, room = SleepsInTurns(tiny), []
    turns = Turns(server, release=lambda: room.append(len(server.order)))
    ran = train("grpo.max_steps=4", "grpo.num_iterations=2", server=server, turns=turns)
    order = [word for word in server.order if word in ("Wake", "Sleep", "PublishAdapter")]
    assert order == ["Wake", "Sleep", "PublishAdapter", "Sleep", "PublishAdapter"] * 2
    assert [step.version for step in ran.steps] == [1, 2, 3, 4]
    assert [step.staleness for step in ran.steps] == [0, 1, 0, 1]
    for step in ran.steps:
        assert (step.wake_s is None) == (step.staleness == 1)
        assert step.train_s > 0
    assert [step.sleep_s is None for step in ran.steps] == [False, True, False, True]
    assert [server.order[place] for place in room] == ["Wake", "PublishAdapter", "Sleep", "PublishAdapter"] * 2


def test_without_turns_nothing_is_put_to_sleep(train, tiny):
    server = SleepsInTurns(tiny)
    ran = train("grpo.max_steps=2", server=server)
    assert not {"Wake", "Sleep"} & set(server.order)
    assert ran.steps[0].sleep_s is None


def test_a_server_that_cannot_wake_is_an_error_and_takes_no_turn():
    class Broken:
        welcome: Any = None

        def submit(self, request: Any, buffer: Any = None) -> Any:
            raise AssertionError("turns wait")

        def ask(self, request: Any, buffer: Any = None) -> Any:
            raise Refused("no memory")

    turns = Turns(Broken())
    with pytest.raises(Refused, match="no memory"), turns.servers():
        pytest.fail("it is not awake")
    assert turns.take() == Turned()
