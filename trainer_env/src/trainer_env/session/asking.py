"""What people ask a run's server, beside what training asks it: completions, and the held-out examples."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bridge.errors import ConfigError
from bridge.protocol import ServerStatus, Status
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

    may_come: at each question, whether a version that nobody has yet is worth waiting for. hold_anew: hold the server
    under another epoch, in which it takes an older adapter than its newest; how it is asked from then on.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        config: TrainConfig,
        turns: Turns,
        hold_anew: Callable[[], tuple[Server, Turns]],
    ) -> None:
        self._server = server
        self._model = model
        self._config = config
        self._turns = turns
        self._hold_anew = hold_anew
        self._given: saved_adapter.Saved | None = None
        self._sampler: Sampler | None = None
        self._open: set[object] = set()
        """A mark for each question that has no answer yet."""
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
        with self._ready(version, may_come=may_come) as sampler:
            groups = completing.complete(
                sampler,
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
        with self._ready(version, may_come=may_come) as sampler:
            return evaluate(
                sampler,
                examples[: (settings.max_examples if max_examples is None else max_examples) or None],
                rewards,
                n=settings.num_generations if n is None else n,
                temperature=settings.temperature if temperature is None else temperature,
                version=completing.number_of(version),
                pass_threshold=settings.pass_threshold,
                scored_at_once=self._config.grpo.scored_at_once,
            )

    @contextmanager
    def _ready(self, version: Version, *, may_come: bool) -> Iterator[Sampler]:
        """To ask under a version that the server holds, or is given now."""
        number, mark = completing.number_of(version), object()
        with self._preparing:  # Several may ask at once.
            self._provide(number, may_come=may_come)
            if self._sampler is None:
                from trainer_env.models import tokenizing

                tokenizer = tokenizing.load(self._model)
                ends = getattr(tokenizer, "eos_token_ids", ())
                self._sampler = Sampler(self._server, tokenizer, self._config, eos_token_ids=ends, turns=self._turns)
            sampler = self._sampler
            self._open.add(mark)
        try:
            yield sampler
        finally:
            self._open.discard(mark)

    def _provide(self, number: int, *, may_come: bool) -> None:
        """Give the server the version that it lacks, if the run has saved it."""
        status: ServerStatus = self._server.ask(Status())
        given = None if may_come else self._given
        saved = saved_adapter.missing(status, self._config.run_dir, number, may_come=may_come, given=given)
        if saved is None:
            return
        if saved_adapter.must_begin_anew(status, saved):
            self._begin_anew(saved.version, status.version)
        with self._turns.servers():
            saved_adapter.publish(self._server, saved, self._config)
        self._given = saved

    def _begin_anew(self, version: int, newest: int) -> None:
        """The server lets go of what it has. Raises ConfigError while others wait for its answers."""
        if self._open:
            raise ConfigError(
                f"The server has version {newest}, which is asked, and takes version {version} only in its place.",
                why="Adapters are given to it in the order of their steps.",
                remedy="Ask for one version after the other, or for the older one first.",
            )
        self._server, self._turns = self._hold_anew()
        self._sampler = None
