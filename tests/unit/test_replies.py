"""One question is answered once, and what is kept is bounded."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from bridge.errors import Refused
from bridge.replies import ENTRY_BYTES, ReplyStore

ID = b"a" * 26
OTHER = b"b" * 26


def test_a_question_is_new_only_once():
    store = ReplyStore(1 << 20)
    assert store.begin(ID, b"question")
    assert not store.begin(ID, b"question")
    store.finish(ID, b"answer")
    assert not store.begin(ID, b"question")


def test_the_answer_is_kept_until_it_is_acknowledged():
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question")
    assert store.stored(ID) is None
    store.finish(ID, b"answer")
    assert store.stored(ID) == b"answer"
    store.forget(ID)
    assert store.stored(ID) is None
    assert (len(store), store.held_bytes) == (0, 0)


@pytest.mark.parametrize("finished", [False, True])
def test_the_same_id_with_another_question_is_refused(finished):
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question")
    if finished:
        store.finish(ID, b"answer")
    with pytest.raises(Refused):
        store.begin(ID, b"another question")


def test_the_same_header_with_a_buffer_of_another_size_is_refused():
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question", 10)
    with pytest.raises(Refused):
        store.begin(ID, b"question", 11)


def test_an_acknowledgement_does_not_forget_what_is_still_worked_on():
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question")
    store.forget(ID)
    assert not store.begin(ID, b"question")


def test_an_abandoned_question_is_new_again():
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question")
    store.abandon(ID)
    assert len(store) == 0
    assert store.begin(ID, b"another question")


def test_an_answer_to_an_abandoned_question_is_not_kept():
    store = ReplyStore(1 << 20)
    store.begin(ID, b"question")
    store.abandon(ID)
    store.finish(ID, b"answer")
    assert (len(store), store.held_bytes) == (0, 0)


def test_beyond_the_budget_the_oldest_answer_goes_and_what_runs_stays():
    store = ReplyStore(2 * ENTRY_BYTES + 150)
    running = b"r" * 26
    store.begin(running, b"question")
    for request_id in (ID, OTHER):
        store.begin(request_id, b"question")
        store.finish(request_id, b"x" * 100)
    assert store.stored(ID) is None
    assert store.stored(OTHER) == b"x" * 100
    assert not store.begin(running, b"question")


def test_an_answer_larger_than_the_budget_is_not_kept():
    store = ReplyStore(1000)
    store.begin(ID, b"question")
    store.finish(ID, b"x" * 2000)
    assert (len(store), store.held_bytes) == (0, 0)


def test_many_empty_answers_count_too():
    store = ReplyStore(100 * ENTRY_BYTES)
    for number in range(1000):
        request_id = number.to_bytes(26, "big")
        store.begin(request_id, b"question")
        store.finish(request_id, b"")
    assert len(store) <= 100


class Store(RuleBasedStateMachine):
    """The store against a plain model of it: a dictionary in order of answering."""

    BUDGET = 4 * ENTRY_BYTES
    ids = Bundle("ids")

    def __init__(self):
        super().__init__()
        self.store = ReplyStore(self.BUDGET)
        self.running: dict[bytes, bytes] = {}
        self.answered: dict[bytes, tuple[bytes, bytes]] = {}

    @rule(target=ids, number=st.integers(0, 7))
    def an_id(self, number):
        return bytes([number]) * 26

    @rule(request_id=ids, header=st.sampled_from([b"one", b"two"]))
    def begin(self, request_id, header):
        known = self.running.get(request_id) or self.answered.get(request_id, (None,))[0]
        if known is None:
            assert self.store.begin(request_id, header)
            self.running[request_id] = header
        elif known == header:
            assert not self.store.begin(request_id, header)
        else:
            with pytest.raises(Refused):
                self.store.begin(request_id, header)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), size=st.integers(0, 2 * ENTRY_BYTES))
    def finish(self, data, size):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.store.finish(request_id, b"x" * size)
        self.answered[request_id] = (self.running.pop(request_id), b"x" * size)
        while sum(ENTRY_BYTES + len(reply) for _, reply in self.answered.values()) > self.BUDGET:
            del self.answered[next(iter(self.answered))]

    @rule(request_id=ids)
    def acknowledge(self, request_id):
        self.store.forget(request_id)
        self.answered.pop(request_id, None)

    @rule(request_id=ids)
    def abandon(self, request_id):
        self.store.abandon(request_id)
        self.running.pop(request_id, None)
        self.answered.pop(request_id, None)

    @invariant()
    def agrees_with_the_model(self):
        assert len(self.store) == len(self.running) + len(self.answered)
        assert self.store.held_bytes == sum(ENTRY_BYTES + len(reply) for _, reply in self.answered.values())
        assert self.store.held_bytes <= self.BUDGET
        for request_id, (_, reply) in self.answered.items():
            assert self.store.stored(request_id) == reply
        for request_id in self.running:
            assert self.store.stored(request_id) is None


TestStore = Store.TestCase
TestStore.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
