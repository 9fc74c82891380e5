"""The job with TRL alone: transformers and PEFT here, `trl vllm-serve` on another GPU. Run by benchmarks/peers.py.

python trl_with_server.py JOB.json, with vLLM importable beside TRL: its client needs it for NCCL.
"""

from typing import Any

import recipe


def arguments(job: dict[str, Any]) -> Any:
    """TRL's GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig(
        **recipe.trl_arguments(job),
        model_init_kwargs={"dtype": job["dtype"]},
        vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{job['port']}",
        vllm_group_port=job["group_port"],
        vllm_server_timeout=job["server_timeout_s"],
    )


def lora(job: dict[str, Any]) -> Any:
    """PEFT's LoraConfig."""
    from peft import LoraConfig

    return LoraConfig(
        r=job["rank"], lora_alpha=job["alpha"], target_modules=job["modules"], lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def main() -> None:
    """Load, train, and leave metrics.jsonl in the working directory."""
    job = recipe.load()
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    trainer = GRPOTrainer(
        model=job["model"],
        args=arguments(job),
        reward_funcs=[recipe.reward],
        train_dataset=recipe.rows(job),
        processing_class=tokenizer,
        peft_config=lora(job),
    )
    print("the server answers", flush=True)
    recipe.write_steps(trainer, job)
    trainer.train()


if __name__ == "__main__":
    main()
