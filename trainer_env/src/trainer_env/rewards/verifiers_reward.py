"""The reward of a `verifiers` task: what its own weighted rewards come to."""

import asyncio
from collections.abc import Sequence
from typing import Any

from trainer_env.data import verifiers_source
from trainer_env.rewards.completions import Completion, RewardFunction, RowError, text_of


def verifiers() -> RewardFunction:
    """What the rewards of a completion's task come to, for data.source = "verifiers:…"; a task may pay more than 1."""

    def reward(
        *,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        verifiers_taskset: Sequence[str],
        verifiers_task: Sequence[int],
        **_: Any,
    ) -> list[float]:
        async def all_rows() -> list[float]:
            rows = zip(prompts, completions, verifiers_taskset, verifiers_task, strict=True)
            return await asyncio.gather(
                *(
                    _score(row, verifiers_source.tasks(taskset)[task], prompt, text_of(completion))
                    for row, (prompt, completion, taskset, task) in enumerate(rows)
                )
            )

        return asyncio.run(all_rows())

    return reward


async def _score(row: int, task: Any, prompt: Any, text: str) -> float:
    vf = verifiers_source.library()
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
    messages = [kinds[turn["role"]](content=turn["content"]) for turn in turns]
    nodes = [
        vf.MessageNode(message=message, parent=place - 1 if place else None, sampled=place == len(messages))
        for place, message in enumerate([*messages, vf.AssistantMessage(content=text)])
    ]
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=nodes,
    )
    try:
        await task.score(trace)
    except Exception as error:
        raise RowError(row, f"the task's own scoring failed: {type(error).__name__}: {error}") from error
    return trace.reward
