"""What plain transformers and PEFT answer: `python peft_greedy.py QUESTIONS.json`, in the trainer's environment.

QUESTIONS.json holds model, adapter, prompts and max_new_tokens. Prints {"base": [[…]], "adapter": [[…]]}: the greedy
completions' token ids in float32, end token included. Neither unsloth nor anything of Tandem is imported.
"""

import json
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    base = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    answers = {"base": [greedy(base, tokenizer, prompt, asked["max_new_tokens"]) for prompt in asked["prompts"]]}
    trained = PeftModel.from_pretrained(base, asked["adapter"])
    answers["adapter"] = [greedy(trained, tokenizer, prompt, asked["max_new_tokens"]) for prompt in asked["prompts"]]
    assert "unsloth" not in sys.modules
    print(json.dumps(answers))


def greedy(model, tokenizer, prompt: str, max_new_tokens: int) -> list[int]:
    conversation = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.eval().generate(**ids, max_new_tokens=max_new_tokens, do_sample=False)
    return answer[0, ids["input_ids"].shape[1] :].tolist()


if __name__ == "__main__":
    main()
