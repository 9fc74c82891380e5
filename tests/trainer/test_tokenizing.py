"""The light tokenizer gives what transformers gives, with none of its weight."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from bridge.errors import ConfigError
from trainer_env.models import tokenizing

TEXTS = [
    "What is 2+3?",
    "  two  spaces\n\nand lines\t",
    "",
    "Größe 北京 🙂 \x1b[31m",
    "<|im_start|>user<|im_end|>",
    "a" * 200,
]
USER = {"role": "user", "content": "What is 2+3?"}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": " And 3+4? "}],
]


@pytest.fixture(scope="module")
def both(tiny):
    return tokenizing.load(tiny), AutoTokenizer.from_pretrained(tiny)


@pytest.mark.parametrize("text", TEXTS)
def test_text_has_the_same_tokens_and_comes_back_alike(both, text):
    ours, theirs = both
    ids = ours(text)["input_ids"]
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_a_conversation_has_the_same_tokens(both, conversation, prompted):
    ours, theirs = both
    how = {"add_generation_prompt": prompted, "tokenize": True, "return_dict": False}
    assert ours.apply_chat_template(conversation, **how) == theirs.apply_chat_template(conversation, **how)


@pytest.mark.parametrize("begun", ["The sum", " of both ", "is\n"])
def test_an_answer_that_was_begun_is_gone_on_with(both, begun):
    ours, theirs = both
    conversation = [USER, {"role": "assistant", "content": begun}]
    how = {"continue_final_message": True, "add_generation_prompt": False, "return_dict": False}
    assert ours.apply_chat_template(conversation, **how) == theirs.apply_chat_template(conversation, **how)


def test_what_ends_a_completion(both):
    ours, theirs = both
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.eos_token_ids[0] == theirs.eos_token_id


def test_every_end_that_the_model_declares_counts(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert set(tokenizing.load(str(folder)).eos_token_ids) >= {7, 9}


def test_a_template_that_refuses_says_so_in_words(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system role, please') }}")
    with pytest.raises(ConfigError, match="no system role, please"):
        tokenizing.load(str(folder)).apply_chat_template([USER])


def test_a_template_reaches_nothing_of_this_process(tiny, tmp_path):
    folder = _copy(tiny, tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(ConfigError):
        tokenizing.load(str(folder)).apply_chat_template([USER])


def test_it_imports_neither_torch_nor_transformers(tiny):
    script = f"""
import sys
from trainer_env.models import tokenizing
tokenizing.load({tiny!r}).apply_chat_template([{USER!r}], add_generation_prompt=True)
print(sorted({{"torch", "transformers", "unsloth"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_a_tokenizer_file_it_is_transformers_own(tiny, tmp_path, monkeypatch):
    folder = _copy(tiny, tmp_path)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "clean_up_tokenization_spaces": True}))
    found = tokenizing.load(str(folder))
    assert not isinstance(found, tokenizing.Tokenizer)
    assert found("What")["input_ids"] == tokenizing.load(tiny)("What")["input_ids"]


def _copy(model: str, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder / "model"))
