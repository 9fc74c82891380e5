"""A Session for code that awaits."""

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from bridge import protocol as p
    from trainer_env.evaluation import Answered
    from trainer_env.runs.records import Summary
    from trainer_env.session import Session
    from trainer_env.session.completing import Prompts


class AsyncSession:
    """What of a Session takes time, to be awaited: each call runs in a thread. The rest is in `session`.

    Questions may be asked while the run trains. A `train` that is cancelled ends after the step that is being taken.
    """

    def __init__(self, session: "Session") -> None:
        self.session = session

    async def generate(self, prompts: "Prompts", **options: Any) -> Any:
        """As `Session.generate`."""
        return await asyncio.to_thread(self.session.generate, prompts, **options)

    async def evaluate(self, **options: Any) -> "Answered":
        """As `Session.evaluate`."""
        return await asyncio.to_thread(self.session.evaluate, **options)

    async def status(self) -> "p.ServerStatus":
        """As `Session.status`."""
        return await asyncio.to_thread(self.session.status)

    async def train(self, steps: int | None = None) -> "Summary":
        """As `Session.train`."""
        stop = threading.Event()  # This training's: the session may be at another one when it is set.
        training = asyncio.create_task(asyncio.to_thread(self.session.train, steps, stop=stop))
        try:
            return await asyncio.shield(training)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([training])
            raise

    async def close(self, *, now: bool = False, keep_server: bool = False) -> None:
        """As `Session.close`."""
        await asyncio.to_thread(self.session.close, now=now, keep_server=keep_server)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
