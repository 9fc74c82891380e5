"""What the peers' scripts share: the job as TRL's arguments, and a line a step with the figures that Tandem writes.

Nothing of torch, trl or unsloth is imported before a function is called: unsloth must come first.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from token_reward import reward

__all__ = ["load", "reward", "rows", "trl_arguments", "write_steps"]


def load() -> dict[str, Any]:
    """The job: the JSON file that the command line names."""
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def rows(job: dict[str, Any]) -> Any:
    """The prompts as a dataset."""
    from datasets import Dataset

    lines = Path(job["prompts_file"]).read_text(encoding="utf-8").splitlines()
    return Dataset.from_list([json.loads(line) for line in lines])


def trl_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Of GRPOConfig: what Tandem sets for the same job (training/trl_settings.py), where it changes the work."""
    return {
        "output_dir": "checkpoints",
        "seed": job["seed"],
        "num_generations": job["completions"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": job["accumulation"],
        "steps_per_generation": job["accumulation"],
        "num_iterations": 1,
        "max_steps": job["steps"],
        "max_completion_length": job["max_tokens"],
        "learning_rate": 1e-5,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "scale_rewards": "group",
        "mask_truncated_completions": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "use_vllm": True,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "gradient_checkpointing": job["checkpointing"] != "off",
        "bf16": job["dtype"] == "bfloat16",
        "dataloader_num_workers": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }


def write_steps(trainer: Any, job: dict[str, Any]) -> None:
    """Have a trainer write metrics.jsonl. rollout_s: vLLM's generate. publish_ms: TRL's sync_weights, before it.

    Unsloth's engine shares the trainer's memory: its sync does nothing, and its adapter is loaded within generate.
    ratio_mean is TRL's own, truncated.
    """
    from transformers import TrainerCallback

    spent = {"generate": 0.0, "sync_weights": 0.0}
    for name in spent:
        _timed(trainer.vllm_generation, name, spent)

    class Steps(TrainerCallback):
        """Splits a step's seconds as Tandem does: train_s is all that is neither sampling nor publishing."""

        def __init__(self) -> None:
            self.mark = self.step_s = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            """Start the clock."""
            self.mark = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Stop it."""
            self.step_s = time.perf_counter() - self.mark

        def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float], **___: Any) -> None:
            """Write the step, now that TRL has its figures."""
            if "learning_rate" not in logs:
                return
            line = _line(state.global_step, self.step_s, spent, logs, job["prompts"] * job["completions"])
            with Path("metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            spent.update(dict.fromkeys(spent, 0.0))
            self.mark = time.perf_counter()

    trainer.add_callback(Steps())


def _line(step: int, step_s: float, spent: dict[str, float], logs: dict[str, float], rows: int) -> dict[str, Any]:
    rollout_s, published_s = spent["generate"], spent["sync_weights"]
    length = logs.get("completions/mean_length")
    tokens = round(length * rows) if length else None
    return {
        "step": step,
        "rollout_s": rollout_s,
        "train_s": max(0.0, step_s - rollout_s - published_s),
        "publish_ms": 1000 * published_s if published_s else None,
        "ratio_mean": logs.get("sampling/importance_sampling_ratio/mean"),
        "reward_mean": logs.get("reward"),
        "completion_length": length,
        "generated_tokens": tokens,
        "generated_tokens_per_s": tokens / rollout_s if tokens and rollout_s else None,
    }


def _timed(owner: Any, name: str, spent: dict[str, float]) -> None:
    """Add the seconds that a method takes to spent."""
    method: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spent[name] += time.perf_counter() - started

    setattr(owner, name, timed)
