"""Who may be in an engine's batch together."""

import asyncio
import random

import pytest

from server_env.engines.gate import Gate


async def test_shared_requests_come_together_and_the_other_kind_alone():
    gate, inside, most = Gate(), [], 0

    async def enter(kind, way):
        nonlocal most
        async with way():
            assert not inside or (kind == "shared" and "alone" not in inside)
            inside.append(kind)
            most = max(most, len(inside))
            for _ in range(random.randrange(4)):
                await asyncio.sleep(0)
            inside.remove(kind)

    kinds = [("alone", gate.alone) if i % 5 == 0 else ("shared", gate.shared) for i in range(100)]
    await asyncio.gather(*(enter(*kind) for kind in kinds))
    assert most > 1


async def test_an_open_gate_lets_everybody_through():
    gate = Gate(open=True)
    async with gate.shared(), gate.alone(), gate.alone(), gate.shared():
        pass


async def test_one_that_must_be_alone_is_not_overtaken_by_those_that_come_later():
    gate, order = Gate(), []
    go = asyncio.Event()

    async def enter(name, way, until=None):
        async with way():
            order.append(name)
            if until:
                await until.wait()

    tasks = [asyncio.create_task(enter("first", gate.shared, go))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(enter("alone", gate.alone)), asyncio.create_task(enter("late", gate.shared))]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["first"]
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "alone", "late"]


async def test_one_that_was_cancelled_holds_nobody_up():
    gate, go = Gate(), asyncio.Event()

    async def hold():
        async with gate.shared():
            await go.wait()

    async def be_alone():
        async with gate.alone():
            pass

    holding, waiting = asyncio.create_task(hold()), asyncio.create_task(be_alone())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(60), gate.shared():
        pass
    go.set()
    await holding
    await be_alone()
