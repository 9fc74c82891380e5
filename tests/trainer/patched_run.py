"""Runs of Unsloth's patched trainer, the one that a GPU gets, on a machine without one; a process of its own.

It prints a JSON object of runs. Unsloth rewrites TRL's trainer on GPUs only; here its own function for that is called.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

WARN = ('rollout.on_sync_mismatch="warn"',)


def main(folder: Path) -> dict[str, Any]:
    """Three runs of two steps, on prompts of unequal length, so that rows are padded."""
    os.environ |= {"UNSLOTH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    from trainer_env.training import grpo

    grpo.import_unsloth()
    import trl
    from unsloth.models.rl import _patch_trl_rl_trainers

    _patch_trl_rl_trainers("grpo_trainer")
    return {
        "trainer": trl.GRPOTrainer.__name__,
        "plain": run(folder, "plain", 0.0),
        "shifted": run(folder, "shifted", 0.5),
        "reused": run(folder, "reused", 0.0, "grpo.num_iterations=2"),
    }


def run(folder: Path, name: str, shift: float, *overrides: str) -> list[dict[str, Any]]:
    """The figures of each step. shift: added to the logprobs that the server reports."""
    from trainer import running
    from trainer.hf_server import HFServer
    from trainer_env import models
    from trainer_env.data import Example

    def shifted(ids: list[int], logprobs: list[float], reason: str) -> tuple[list[int], list[float], str]:
        return ids, [value + shift for value in logprobs], reason

    done = running.train(
        running.tiny_config(folder, "grpo.learning_rate=1e-3", *overrides, *(WARN if shift else ()), run=name),
        server=HFServer(models.resolve(running.TINY), edit=shifted),
        examples=[Example([{"role": "user", "content": "hello " * count}], answer="") for count in (1, 20, 9, 3)],
    )
    names = ("ratio_mean", "dlogp_mean_abs", "grad_norm", "staleness", "proof")
    return [{name: getattr(step, name) for name in names} for step in done.steps]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
