"""A Session that is awaited: what is cancelled ends, and nothing else does."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer_env import config
from trainer_env.placement import Placement
from trainer_env.session import Session


class Trainings:
    """What a session trains here: nothing, until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.asked_to_stop: list[bool] = []

    def take(self, session: Session) -> SimpleNamespace:
        self.begun.release()
        assert self.may_end.acquire(timeout=30)
        self.asked_to_stop.append(session._interrupts.stop.is_set())
        return SimpleNamespace()

    async def have_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=30)


@pytest.fixture
def trainings(monkeypatch) -> Trainings:
    trainings = Trainings()
    monkeypatch.setattr(Session, "_trained", lambda session, _steps: trainings.take(session))
    return trainings


@pytest.fixture
def session(tmp_path, monkeypatch, request) -> Session:
    (tmp_path / "server-vllm").symlink_to(sys.prefix)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path))
    demo = Path(request.config.rootpath) / "configs" / "demo.toml"
    return Session(config.load(demo, [f'output_dir="{tmp_path}"']), Placement(mode="cpu"), by_hand=True)


async def test_a_training_that_is_cancelled_is_asked_to_stop(session, trainings):
    training = asyncio.create_task(session.aio.train())
    await trainings.have_begun()
    training.cancel()
    await asyncio.sleep(0)
    trainings.may_end.release()
    with pytest.raises(asyncio.CancelledError):
        await training
    assert trainings.asked_to_stop == [True]


async def test_a_training_that_had_ended_when_it_was_cancelled_does_not_stop_the_next_one(session, trainings):
    training = asyncio.create_task(session.aio.train())
    await trainings.have_begun()
    trainings.may_end.release()
    deadline = time.monotonic() + 30
    while session._training.locked() and time.monotonic() < deadline:
        time.sleep(0.01)  # noqa: ASYNC251 (the loop is not to hear of the end)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    trainings.may_end.release()
    await session.aio.train()
    assert trainings.asked_to_stop == [False, False]


async def test_a_step_that_is_ended_is_one_of_the_training_that_runs(session, trainings):
    session.end_step()
    training = asyncio.create_task(session.aio.train())
    await trainings.have_begun()
    trainings.may_end.release()
    await training
    assert trainings.asked_to_stop == [False]
