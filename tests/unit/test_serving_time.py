"""Time limits of work: they stand still while no engine serves."""

import asyncio

import pytest

from server_env.supervision.serving_time import ServingTime

SHORT_S, LONGER_S = 0.05, 0.3


async def limited(time, seconds, *steps):
    """Do the steps within a limit, and then nothing: whether the limit came, and how many steps were done."""
    done = 0
    try:
        async with time.timeout(seconds):
            for step in steps:
                await step(time)
                done += 1
            await asyncio.sleep(60)
    except TimeoutError:
        return True, done
    return False, done


async def engine_dies(time):
    time.passes(False)


async def engine_is_back(time):
    time.passes(True)


async def a_while(_time):
    await asyncio.sleep(LONGER_S)


async def test_while_an_engine_serves_a_limit_is_as_any_other():
    assert await limited(ServingTime(), SHORT_S, a_while) == (True, 0)


@pytest.mark.parametrize("serves", [True, False])
async def test_time_without_an_engine_does_not_count_and_the_rest_does(serves):
    time = ServingTime()
    time.passes(serves)
    assert await limited(time, SHORT_S, engine_dies, a_while, engine_is_back) == (True, 3)


async def dies_as_the_limit_comes(time):
    try:
        await asyncio.sleep(60)
    finally:
        await engine_dies(time)
        await engine_is_back(time)


async def test_a_limit_that_is_just_coming_comes():
    assert await limited(ServingTime(), SHORT_S, dies_as_the_limit_comes) == (True, 0)
