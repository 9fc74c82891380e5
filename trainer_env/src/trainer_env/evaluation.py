"""The held-out examples, answered by the server and scored like any completion."""

from collections.abc import Sequence

from trainer_env.config import EvaluationConfig
from trainer_env.data import Example, column_names, columns
from trainer_env.records import Phase, Sample
from trainer_env.rewards import Reward, score
from trainer_env.sampler import Sampler
from trainer_env.scoring import readable


def evaluate(
    sampler: Sampler,
    examples: Sequence[Example],
    rewards: Sequence[Reward],
    config: EvaluationConfig,
    *,
    phase: Phase,
    step: int,
) -> list[Sample]:
    """One answer to each example under adapter version `step`, with its rewards. Raises what the server answers."""
    examples = examples[: config.max_examples or None]
    prompts = [example.prompt for example in examples]
    groups = sampler.sample(prompts, temperature=config.temperature, version=step)
    answers = [group[0] for group in groups]
    texts = [sampler.decode(answer) for answer in answers]
    known = [name for name in column_names(examples) if name != "prompt"]
    scores = score(
        rewards,
        prompts,
        [_as_completion(prompt, text) for prompt, text in zip(prompts, texts, strict=True)],
        **columns(examples, known),
        completion_ids=[answer.token_ids for answer in answers],
        finish_reason=[answer.finish_reason for answer in answers],
    )
    return [
        Sample(
            phase=phase,
            step=step,
            version=answers[row].version,
            prompt=readable(prompts[row]),
            completion=texts[row],
            token_ids=answers[row].token_ids,
            reward=scores.total[row],
            rewards={name: each[row] for name, each in scores.each.items()},
            answer=examples[row].answer,
            finish_reason=answers[row].finish_reason,
        )
        for row in range(len(examples))
    ]


def _as_completion(prompt: object, text: str) -> object:
    """Rewards see what TRL gives them: a turn after a conversation, text after text."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
