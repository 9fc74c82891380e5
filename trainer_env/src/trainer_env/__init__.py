"""The trainer half: GRPO with LoRA through Unsloth and TRL."""
