"""What people ask a run's server, beside what training asks it: completions, and the held-out examples."""

import threading
from collections.abc import Sequence
from typing import Any

from trainer_env.config import TrainConfig
from trainer_env.data import Example
from trainer_env.evaluation import Answered, evaluate
from trainer_env.publishing import saved_adapter
from trainer_env.rewards import Reward
from trainer_env.sampling.sampler import Sampler
from trainer_env.serving.server import Server
from trainer_env.serving.turns import Turns
from trainer_env.session import completing
from trainer_env.session.completing import Prompts, Version


class Asking:
    """Asks one server, with a tokenizer that needs no torch. model: what `models.resolve` returned.

    may_come: at each question, whether a version that nobody has yet is worth waiting for.
    """

    def __init__(self, server: Server, model: str, config: TrainConfig, turns: Turns) -> None:
        self._server = server
        self._model = model
        self._config = config
        self._turns = turns
        self._sampler: Sampler | None = None
        self._preparing = threading.Lock()

    def generate(
        self,
        prompts: Prompts,
        *,
        n: int,
        temperature: float | None,
        max_tokens: int | None,
        version: Version,
        may_come: bool,
    ) -> Any:
        """See `Session.generate`."""
        grpo = self._config.grpo
        groups = completing.complete(
            self._ready(version, may_come=may_come),
            completing.as_prompts(prompts, self._config.data),
            n=n,
            temperature=grpo.temperature if temperature is None else temperature,
            max_tokens=max_tokens or grpo.max_completion_length,
            version=version,
        )
        return groups[0] if completing.is_single(prompts) else groups

    def evaluate(
        self,
        examples: Sequence[Example],
        rewards: Sequence[Reward],
        *,
        version: Version,
        n: int | None,
        temperature: float | None,
        max_examples: int | None,
        may_come: bool,
    ) -> Answered:
        """See `Session.evaluate`. None: as the config says."""
        settings = self._config.evaluation
        return evaluate(
            self._ready(version, may_come=may_come),
            examples[: (settings.max_examples if max_examples is None else max_examples) or None],
            rewards,
            n=settings.num_generations if n is None else n,
            temperature=settings.temperature if temperature is None else temperature,
            version=completing.number_of(version),
            pass_threshold=settings.pass_threshold,
            scored_at_once=self._config.grpo.scored_at_once,
        )

    def _ready(self, version: Version, *, may_come: bool) -> Sampler:
        """To ask under a version that the server holds, or is given now."""
        number = completing.number_of(version)
        with self._preparing:  # Several may ask at once.
            folder = saved_adapter.missing(self._server, self._config.run_dir, number, may_come=may_come)
            if folder:
                with self._turns.servers():
                    saved_adapter.publish(self._server, folder, self._config)
            if self._sampler is None:
                from trainer_env.models import tokenizing

                tokenizer = tokenizing.load(self._model)
                ends = getattr(tokenizer, "eos_token_ids", ())
                self._sampler = Sampler(self._server, tokenizer, self._config, eos_token_ids=ends, turns=self._turns)
            return self._sampler
