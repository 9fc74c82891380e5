"""The job that is timed: its sizes from the command line, its prompts, and the same job as Tandem's config."""

import argparse
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REWARD = ROOT / "benchmarks" / "token_reward.py"
PROMPT_TOKENS = 96
"""Room for a prompt; they have about twenty tokens."""

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Job:
    """One GRPO job. A step is prompts x completions rows of up to max_tokens, trained on micro_batch rows at a time."""

    model: str
    steps: int
    prompts: int
    completions: int
    max_tokens: int
    micro_batch: int
    rank: int
    checkpointing: str
    """off; on: as in transformers; unsloth: Unsloth's own where there is Unsloth, else as in transformers."""
    dtype: str
    seed: int

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together."""
        return PROMPT_TOKENS + self.max_tokens

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.prompts * self.completions // self.micro_batch

    def write_prompts(self, folder: Path) -> Path:
        """A prompt a line, enough for all steps up to a few thousand, none twice."""
        rng, path = random.Random(self.seed), folder / "prompts.jsonl"
        pairs = rng.sample(range(10_000), min(4096, self.prompts * max(4, self.steps)))
        lines = [{"prompt": f"What is {n // 100}+{n % 100}? Answer with just the number."} for n in pairs]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return path

    def as_json(self) -> dict[str, Any]:
        """For a peer's script."""
        return asdict(self) | {
            "context": self.context,
            "accumulation": self.accumulation,
            "modules": list(MODULES),
            "alpha": 2 * self.rank,
        }

    def write_config(self, folder: Path, prompts: Path, backend: str) -> Path:
        """The job as a TOML file for tandem-train."""
        sections: dict[str, dict[str, Any]] = {
            "model": {
                "name": self.model,
                "dtype": self.dtype,
                "max_seq_length": self.context,
                "use_gradient_checkpointing": {"off": False, "on": True}.get(self.checkpointing, self.checkpointing),
            },
            "lora": {"r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": list(MODULES)},
            "data": {"source": str(prompts), "answer_column": "", "chat": False, "eval_size": 0},
            "grpo": {
                "num_generations": self.completions,
                "per_device_train_batch_size": self.micro_batch,
                "gradient_accumulation_steps": self.accumulation,
                "max_steps": self.steps,
                "max_completion_length": self.max_tokens,
                "learning_rate": 1e-5,
            },
            # A speed is worth having even where the halves disagree; the verdicts are reported beside it.
            "rollout": {"on_sync_mismatch": "warn"},
            "evaluation": {"before": False, "after": False},
            "tracking": {"display": "plain", "samples_per_step": 0},
            "server": {"backend": backend},
        }
        lines = [f"seed = {self.seed}", f"output_dir = {json.dumps(str(folder / 'runs'))}"]
        for name, settings in sections.items():
            lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
        lines += ["", "[[rewards]]", f"function = {json.dumps(f'{REWARD}:reward')}"]
        path = folder / "job.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of steps takes."""
    add = parser.add_argument
    add("--model", required=True, help="a folder (benchmarks/random_model.py makes one) or builtin:NAME")
    add("--backend", choices=["vllm", "sglang"], default="vllm", help="the engine behind Tandem (%(default)s)")
    add("--steps", type=int, default=20, help="optimizer steps of each run (%(default)s)")
    add("--warm-up", type=int, default=3, metavar="N", help="first steps that no median counts (%(default)s)")
    add("--prompts", type=int, default=32, help="a step (%(default)s)")
    add("--completions", type=int, default=8, help="of a prompt (%(default)s)")
    add("--max-tokens", type=int, default=256, help="of a completion (%(default)s)")
    add("--micro-batch", type=int, default=64, help="rows in one forward and backward pass (%(default)s)")
    add("--rank", type=int, default=16, help="of the adapter, on all seven projections (%(default)s)")
    add("--checkpointing", choices=["off", "on", "unsloth"], default="unsloth", help="of activations (%(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the base model (%(default)s)")
    add("--seed", type=int, default=0, help="of prompts and adapters (%(default)s)")
    add("--server-gpus", metavar="IDS", help="GPUs that sample, as for tandem-train")
    add("--trainer-gpus", metavar="IDS", help="GPUs that train, as for tandem-train")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="as for tandem-train")
    add(
        "--cold", type=int, default=0, metavar="N", help="start each with empty caches first, for N steps (%(default)s)"
    )
    add("--venvs", type=Path, default=Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs"), help="(%(default)s)")
    add("--timeout-s", type=float, default=1800, help="for one run (%(default)s)")
    add("--keep", type=Path, metavar="FOLDER", help="for the runs and their logs (default: a folder that is removed)")
    add("--out", type=Path, metavar="FILE", help="everything as JSON; written anew after each run")


def job_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Job:
    """The job that the options describe; ends the program where they do not come out even."""
    rows = options.prompts * options.completions
    if rows % options.micro_batch:
        parser.error(f"--micro-batch must divide the {rows} rows of a step")
    if not 1 <= options.warm_up < options.steps:
        parser.error("--steps must be more than --warm-up, and that at least 1")
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep: {options.keep} is not empty")
    model = options.model if options.model.startswith("builtin:") else str(Path(options.model).resolve())
    return Job(
        model=model,
        steps=options.steps,
        prompts=options.prompts,
        completions=options.completions,
        max_tokens=options.max_tokens,
        micro_batch=options.micro_batch,
        rank=options.rank,
        checkpointing=options.checkpointing,
        dtype=options.dtype,
        seed=options.seed,
    )
