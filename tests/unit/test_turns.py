"""Several questions at once take one turn of the server's: it sleeps when the last one has its answer."""

import threading
from typing import Any

import pytest

from bridge.protocol import Sleep, Slept, Wake
from trainer_env.serving.turns import Turns


class Server:
    """Says how it was turned, in order. slowly: its answer to the next sleep waits for that."""

    welcome: Any = None

    def __init__(self) -> None:
        self.order: list[str] = []
        self.asked_to_sleep, self.slowly = threading.Event(), threading.Event()
        self.slowly.set()

    def ask(self, request: Any, buffer: Any = None) -> Any:
        assert isinstance(request, Sleep | Wake)
        if isinstance(request, Sleep):
            self.asked_to_sleep.set()
            assert self.slowly.wait(60)
        self.order.append(type(request).__name__)
        return Slept(seconds=0.0, freed_bytes=0)

    submit = ask


class Question(threading.Thread):
    """Somebody who is in the server's turn until `answered` is set."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(daemon=True)
        self._turns = turns
        self.inside, self.answered = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._turns.servers():
            self.inside.set()
            assert self.answered.wait(60)

    def end(self) -> None:
        self.answered.set()
        self.join(60)
        assert not self.is_alive()


def test_the_server_stays_awake_until_the_last_question_has_its_answer():
    server = Server()
    turns = Turns(server)
    long = Question(turns)
    assert long.inside.wait(60)
    with turns.servers():
        pass
    assert server.order == ["Wake"]
    long.end()
    assert server.order == ["Wake", "Sleep"]


def test_a_question_that_comes_while_it_falls_asleep_wakes_it_afterwards():
    server = Server()
    turns = Turns(server)
    server.slowly.clear()
    first = Question(turns)
    first.answered.set()
    assert server.asked_to_sleep.wait(60)
    second = Question(turns)
    assert not second.inside.is_set()
    server.slowly.set()
    assert second.inside.wait(60)
    assert server.order == ["Wake", "Sleep", "Wake"]
    second.end()


def test_an_error_leaves_it_awake_for_the_others_and_is_forgotten():
    server = Server()
    turns = Turns(server)
    with turns.servers():
        with pytest.raises(ValueError, match="mine"), turns.servers():
            raise ValueError("mine")
        assert server.order == ["Wake"]
    assert server.order == ["Wake", "Sleep"]


def test_after_an_adapter_it_stays_awake_for_those_who_ask_it():
    server = Server()
    turns = Turns(server)
    with turns.servers():
        turns.sleep_again()
        assert server.order == ["Wake"]
    turns.sleep_again()
    assert server.order == ["Wake", "Sleep", "Sleep"]
