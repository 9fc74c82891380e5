"""Rewards that teach nothing: the completions of a prompt are told apart by nobody, step after step."""

from collections.abc import Mapping

PATIENCE = 10
"""Optimizer steps in a row after which people are told."""


class FlatRewards:
    """Counts the steps whose rewards did not differ in any group, and says so once.

    With grpo.scale_rewards = "batch" TRL looks at the whole batch: then not from prompt to prompt either.
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._in_a_row = 0
        self._told = False

    def step(self, logs: Mapping[str, float], reward: float | None) -> str:
        """Note an optimizer step; what to tell people, mostly nothing. logs: TRL's figures of it. reward: its mean.

        A step that reuses a batch has no share of its own: it is that of the batch.
        """
        self._share = logs.get("frac_reward_zero_std", self._share)
        self._in_a_row = self._in_a_row + 1 if self._share >= 1 else 0
        if self._in_a_row < PATIENCE or self._told:
            return ""
        self._told = True
        at = "" if reward is None else f" (mean now {reward:g})"
        return (
            f"{PATIENCE} steps in a row taught nothing: all completions of a prompt got the same reward{at}. Look at "
            "samples.jsonl: does the reward read a completion as it is, a list of messages (a text with data.chat = "
            "false)? Are the prompts too easy or too hard? Is grpo.temperature too low?"
        )
