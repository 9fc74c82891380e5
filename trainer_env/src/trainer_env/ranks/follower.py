"""A further process of a trainer on several GPUs: it samples and trains its share, and leaves all else to the first."""

from threading import Event

from trainer_env import data, models, ranks, rewards
from trainer_env.config import TrainConfig
from trainer_env.data.ordering import Schedule
from trainer_env.devices import confine
from trainer_env.placement import Placement
from trainer_env.ranks.followed_server import FollowedServer
from trainer_env.sampling import prompts
from trainer_env.sampling.rollouts import Rollouts
from trainer_env.sampling.sampler import Sampler
from trainer_env.serving import MAX_RESTARTS
from trainer_env.serving.server_settings import ready_within_s


class Follower:
    """`run` does what the first process's Session does between connecting and the last optimizer step."""

    def __init__(self, config: TrainConfig, placement: Placement, *, resume: bool = False) -> None:
        self.stop = Event()
        self._config = config
        self._placement = placement
        self._resume = resume
        self._rewards = rewards.load(config.rewards)
        self._data = data.load(config.data, config.seed)

    def run(self) -> None:
        """Train along. Raises what the server, a reward or the trainer raises."""
        config = self._config
        confine(self._placement.trainer_environment())
        from trainer_env.publishing.publisher import Publisher
        from trainer_env.training import grpo

        model = models.resolve(config.model.name)
        fitting = prompts.fitting_early(config, self._data, model)
        policy = grpo.load_policy(config, model)
        fitting = prompts.fitting(config, fitting.data, policy.tokenizer)  # As in the first process: the same examples.
        ranks.join(on_gpu=self._placement.mode != "cpu")
        another_within_s = MAX_RESTARTS * ready_within_s(config)
        server = FollowedServer(config.run_dir, ranks.word_of_the_first(""), another_within_s=another_within_s)
        try:
            sampler = Sampler(server.client, policy.tokenizer, config, eos_token_ids=policy.eos_token_ids)
            grpo.run(
                policy,
                config,
                rewards=self._rewards,
                rollouts=Rollouts(
                    sampler,
                    config,
                    Schedule(config, fitting.data.train, rank=ranks.rank(), ranks=ranks.count()),
                    max_staleness=config.max_staleness(self._placement.mode),
                ),
                publisher=Publisher(server.client),
                tracker=None,
                resume=self._resume,
                stop=self.stop,
            )
        finally:
            server.close()
