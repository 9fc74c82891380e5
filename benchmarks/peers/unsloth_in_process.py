"""The job with Unsloth's own fast_inference: vLLM in the trainer's process, on one GPU. Run by benchmarks/peers.py.

python unsloth_in_process.py JOB.json, with vLLM and Unsloth both importable.
"""

from typing import Any

import recipe


def arguments(job: dict[str, Any]) -> Any:
    """GRPOConfig, Unsloth's own. unsloth is to be imported before."""
    from trl import GRPOConfig

    return GRPOConfig(**recipe.trl_arguments(job))


def main() -> None:
    """Load, train, and leave metrics.jsonl in the working directory."""
    job = recipe.load()
    from unsloth import FastLanguageModel  # isort: skip (before torch)
    import torch

    model, tokenizer = FastLanguageModel.from_pretrained(
        job["model"],
        max_seq_length=job["context"],
        dtype=getattr(torch, job["dtype"]),
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=job["rank"],
        gpu_memory_utilization=job["memory_share"],
        use_exact_model_name=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=job["rank"],
        lora_alpha=job["alpha"],
        target_modules=job["modules"],
        use_gradient_checkpointing={"off": False, "on": True}.get(job["checkpointing"], "unsloth"),
        random_state=job["seed"],
    )
    tokenizer.padding_side = "left"
    print("the trainer's model is loaded", flush=True)
    from trl import GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        args=arguments(job),
        reward_funcs=[recipe.reward],
        train_dataset=recipe.rows(job),
        processing_class=tokenizer,
    )
    recipe.write_steps(trainer, job)
    trainer.train()


if __name__ == "__main__":
    main()
