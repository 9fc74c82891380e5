"""The one place that reaches into TRL's trainer, so that it uses the logprobs which rollout_func returns.

TRL 1.15 corrects for the sampling distribution only when `use_vllm` is set, and setting that in the config makes it
start a vLLM client of its own, in this environment. So the trainer is built without it and told afterwards. Unsloth's
patched trainer reads the same attributes.

To be removed once TRL applies its importance-sampling correction to the logprobs of a `rollout_func` by itself: then
`test_trl_ignores_sampling_logprobs_without_the_shim` in tests/trainer/test_shim.py fails.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bridge.errors import SyncMismatch
from trainer_env.proof.agreement import Agreement
from trainer_env.sampling.rollouts import Rollouts


class _Sync:
    """What TRL calls once an optimizer step, before the rollout, where it expects its own vLLM client."""

    def __init__(self, publish: Callable[[], None]) -> None:
        self.sync_weights = publish


def using_sampling_logprobs(trainer_class: Any) -> Any:
    """A GRPOTrainer class, TRL's or Unsloth's, whose trainers use, measure and require sampling logprobs.

    Call `use_rollouts` on the trainer once it is built.
    """
    return type(trainer_class.__name__, (_UsesSamplingLogprobs, trainer_class), {})


class _UsesSamplingLogprobs:
    """Goes before a GRPOTrainer among a class's bases."""

    # What the trainer class brings.
    state: Any
    model: Any
    accelerator: Any
    args: Any
    use_vllm: bool
    vllm_mode: str
    vllm_generation: Any

    def use_rollouts(
        self,
        rollouts: Rollouts,
        agreement: Agreement,
        publish: Callable[[], None],
        untempered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Call once, after construction. publish: makes the server serve the weights as they are now. untempered: a
        context in which the trainer's logprobs are those at temperature 1.
        """
        self._rollouts = rollouts
        self._agreement = agreement
        self._untempered = untempered
        self.use_vllm = True
        self.vllm_mode = "server"
        self.vllm_generation = _Sync(publish)
        self._last_loaded_step = -1

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """As TRL's, with two columns more: the version that sampled each row, and the step at which that was."""
        calls = self._rollouts.calls
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self._rollouts.calls == calls:
            raise SyncMismatch(
                "The trainer generated a batch without calling rollout_func.",
                why="This release of TRL or Unsloth ignores it, and sampled from the training model instead.",
                remedy="Install the pinned versions with scripts/setup_envs.sh.",
            )
        versions = self._rollouts.batches[-1].versions
        device = batch["completion_ids"].device
        batch["sampled_version"] = torch.tensor(versions, device=device)
        batch["sampled_step"] = torch.full((len(versions),), self.state.global_step, device=device)
        return batch

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As TRL's; first compares the micro-batch's logprobs under the weights before the step with the server's."""
        server = inputs.get("sampling_per_token_logps")
        if server is None and self.args.vllm_importance_sampling_correction:
            raise SyncMismatch(
                "The trainer dropped the logprobs that rollout_func returned.",
                why="This release of TRL or Unsloth no longer keeps them, so nothing corrects for the sampling policy.",
                remedy="Install the pinned versions with scripts/setup_envs.sh.",
            )
        if server is not None:
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            self._agreement.add(self._logprobs_before_the_step(model, inputs), server, mask, inputs["sampled_version"])
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def untempered_logprobs(self, rows: list[list[int]]) -> list[list[float]]:
        """Of all tokens but each row's first, at temperature 1, computed as in training. rows: of one length."""
        ids = torch.tensor(rows, device=self.accelerator.device)
        tokens = ids.size(1) - 1
        with torch.no_grad(), self._untempered(), _without_dropout(self.model):
            logprobs = self._get_per_token_logps_and_entropies(  # type: ignore[attr-defined]
                self.model, ids, torch.ones_like(ids), tokens
            )[0]
        return unpacked(logprobs, torch.ones_like(ids[:, :1]), tokens).tolist()

    def _logprobs_before_the_step(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """(rows, tokens). TRL's own figures when they are of these weights; a batch in reuse is scored once more."""
        logprobs = inputs.get("old_per_token_logps")
        if logprobs is None or int(inputs["sampled_step"][0]) != self.state.global_step:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
            attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
            with torch.no_grad():
                logprobs = self._get_per_token_logps_and_entropies(  # type: ignore[attr-defined]
                    model, ids, attention, inputs["completion_ids"].size(1)
                )[0]
        return unpacked(logprobs, inputs["prompt_mask"], inputs["completion_ids"].size(1))


@contextmanager
def _without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Everything else stays in training mode, as in the forward that is compared with the server."""
    active = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    for module in active:
        module.eval()
    try:
        yield
    finally:
        for module in active:
            module.train()


def unpacked(logprobs: torch.Tensor, prompt_mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Logprobs as (rows, tokens of the completion), from TRL's layout or from Unsloth's.

    Unsloth moves a row's left padding to its right end, so its rows begin with a few prompt tokens, and each completion
    starts further left by its row's own padding. prompt_mask: (rows, prompt tokens), left-padded.
    """
    longest = logprobs.size(1) - tokens
    if longest == 0:
        return logprobs
    padding = (prompt_mask == 0).sum(dim=1)
    columns = (longest - padding).unsqueeze(1) + torch.arange(tokens, device=logprobs.device)
    return logprobs.gather(1, columns)
