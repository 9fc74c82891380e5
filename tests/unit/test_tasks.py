"""Cancellations that come at the worst moment are neither lost nor sent on to what must not be cut short."""

import asyncio

import pytest

from server_env.tasks import to_its_end, together


async def a_moment():
    for _ in range(20):
        await asyncio.sleep(0)


class Work:
    """Takes until it is let go; cancelled, it takes until then to end. cancelled: how often."""

    def __init__(self):
        self.may_end, self.begun, self.ended, self.cancelled = asyncio.Event(), False, False, 0

    async def done(self):
        self.begun = True
        try:
            await asyncio.Event().wait()
        finally:
            while not self.may_end.is_set():
                try:
                    self.cancelled += 1
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    pass
            self.ended = True


async def value(of):
    return of


async def failing(error):
    raise error


async def test_the_results_come_in_order():
    assert await together(value(n) for n in (3, 1, 2)) == [3, 1, 2]


async def test_the_first_error_is_raised_once_the_others_have_ended():
    work = Work()
    waiting = asyncio.create_task(together([work.done(), failing(ValueError("first"))]))
    await a_moment()
    assert work.cancelled == 1
    assert not waiting.done()
    work.may_end.set()
    with pytest.raises(ValueError, match="first"):
        await waiting
    assert work.ended


async def test_a_cancellation_that_comes_while_the_others_end_after_an_error_is_not_lost():
    work = Work()
    waiting = asyncio.create_task(together([work.done(), failing(ValueError("first"))]))
    await a_moment()
    waiting.cancel()
    await a_moment()
    work.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert work.ended


async def test_cancelled_it_cancels_all_once_and_waits_for_them():
    works = [Work(), Work()]
    waiting = asyncio.create_task(together(work.done() for work in works))
    await a_moment()
    waiting.cancel()
    await a_moment()
    assert [work.cancelled for work in works] == [1, 1]
    works[0].may_end.set()
    await a_moment()
    assert not waiting.done()
    works[1].may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_what_is_done_to_its_end_hears_of_no_cancellation_and_whoever_waits_does_afterwards():
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def work():
        await may_end.wait()
        ended.set()

    waiting = asyncio.create_task(to_its_end(work()))
    for _ in range(3):
        await a_moment()
        waiting.cancel()
    await a_moment()
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_the_result_or_error_of_what_is_done_to_its_end_is_passed_on():
    assert await to_its_end(value(4)) == 4
    with pytest.raises(ValueError, match="x"):
        await to_its_end(failing(ValueError("x")))
