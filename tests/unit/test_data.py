"""Prompts and answers: from where they come, what is held out, and how bad data is named."""

import json

import pytest

from bridge.errors import ConfigError
from trainer_env import data
from trainer_env.config import DataConfig


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(source, seed=0, **settings):
    return data.load(DataConfig(source=source, **{"eval_size": 0, **settings}), seed)


def refusal(source, **settings):
    with pytest.raises(ConfigError) as refused:
        load(source, **settings)
    return str(refused.value)


def text_of(example):
    return example.prompt[-1]["content"]


def user(text):
    return [{"role": "user", "content": text}]


def test_arithmetic_has_every_sum_once():
    loaded = data.load(DataConfig(), seed=0)
    both = loaded.train + loaded.evaluation
    questions = {text_of(example): example.answer for example in both}
    assert len(both) == len(questions) == 81
    assert len(loaded.evaluation) == 16
    assert questions["What is 7+8? Answer with just the number."] == "15"


def test_the_seed_decides_what_is_held_out():
    first, again, other = (data.load(DataConfig(), seed) for seed in (3, 3, 4))
    assert first == again
    assert first.evaluation != other.evaluation
    assert not [example for example in first.evaluation if example in first.train]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_file_gives_prompts_answers_and_the_other_columns(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        path.write_text('﻿prompt,answer,level\nOne?,1,easy\n"Two, or\nmore?",2,hard\n', encoding="utf-8")
    else:
        jsonl(
            path,
            {"prompt": "One?", "answer": "1", "level": "easy"},
            {"prompt": "Two, or\nmore?", "answer": "2", "level": "hard"},
        )
    assert load(str(path)).train == [
        data.Example(user("One?"), "1", {"level": "easy"}),
        data.Example(user("Two, or\nmore?"), "2", {"level": "hard"}),
    ]


def test_a_row_for_trl_has_every_column(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"question": "One?", "label": 1, "level": "easy", "completions": "drop me"})
    (example,) = load(path, prompt_column="question", answer_column="label").train
    assert example.row() == {"prompt": user("One?"), "answer": "1", "question": "One?", "label": 1, "level": "easy"}


def test_a_template_and_a_system_prompt_make_the_prompt(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"a": 2, "b": {"c": 3}, "answer": 5.5})
    (example,) = load(path, prompt_template="{a} and {b[c]}? {{}}", system_prompt="Be brief.").train
    assert example.prompt == [{"role": "system", "content": "Be brief."}, *user("2 and 3? {}")]
    assert example.answer == "5.5"


def test_an_answer_can_be_a_list_of_what_is_accepted(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "answer": ["5", 5.5, True]}, {"prompt": "b", "answer": False})
    assert [example.answer for example in load(path).train] == [["5", "5.5", "True"], "False"]


def test_messages_are_taken_as_they_are(tmp_path):
    chat = [{"role": "system", "content": "s"}, *user("Hi"), {"role": "assistant", "content": "Yes"}, *user("And?")]
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": chat, "answer": None})
    (example,) = load(path, system_prompt="not this one").train
    assert example.prompt == chat
    assert example.answer is None


def test_raw_text_stays_text(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "Once upon"})
    assert load(path, chat=False, answer_column="").train == [data.Example("Once upon")]


def test_without_an_answer_column_one_called_answer_reaches_the_rewards_as_it_is(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "answer": {"b": 1}}, {"prompt": "c"})
    examples = load(path, answer_column="").train
    assert [example.answer for example in examples] == [None, None]
    assert data.columns(examples, ["answer"]) == {"answer": [{"b": 1}, None]}
    (named,) = load(
        jsonl(tmp_path / "named.jsonl", {"prompt": "a", "answer": {}, "label": 1}), answer_column="label"
    ).train
    assert named.row()["answer"] == "1"


def test_another_file_can_be_the_evaluation_split(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", *({"prompt": f"{n}?", "answer": n} for n in range(5)))
    held = jsonl(tmp_path / "held.jsonl", *({"prompt": f"{n}!", "answer": n} for n in range(9)))
    loaded = load(train, eval_split=held, eval_size=4, max_examples=3)
    assert [example.answer for example in loaded.train] == ["0", "1", "2"]
    assert len(loaded.evaluation) == 4
    assert all(text_of(example).endswith("!") for example in loaded.evaluation)


def test_an_evaluation_split_that_cannot_be_is_refused(tmp_path):
    assert "data.eval_split: builtin:arithmetic has no split 'test'" in refusal(
        "builtin:arithmetic", eval_split="test", eval_size=4
    )
    train = jsonl(tmp_path / "train.jsonl", {"prompt": "a", "answer": 1})
    for split in ("test", "held.jsonl", str(tmp_path)):
        assert f"data.eval_split: {split!r} is no file" in refusal(train, eval_split=split, eval_size=4)


def test_a_missing_column_names_those_that_exist(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"promt": "x", "answer": "y"})
    message = refusal(path)
    assert "data.prompt_column: there is no column 'prompt'; there are: promt, answer" in message
    assert "Did you mean 'promt'?" in message
    assert "data.answer_column: there is no column 'solution'" in refusal(
        path, prompt_column="promt", answer_column="solution"
    )
    assert "data.prompt_template: there is no column 'topic'" in refusal(path, prompt_template="{topic}")


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        ([{"prompt": "a", "answer": 1}, {"answer": 2}], {}, "row 2: column 'prompt' is empty"),
        (
            [{"prompt": "  ", "answer": 1}],
            {},
            "row 1: column 'prompt': expected the prompt as text or as a list of messages",
        ),
        (
            [{"prompt": 7, "answer": 1}],
            {},
            "row 1: column 'prompt': expected the prompt as text or as a list of messages, got 7",
        ),
        (
            [{"prompt": "a", "answer": 1}, {"prompt": [{"role": "asistant", "content": "a"}], "answer": 1}],
            {},
            "row 2: column 'prompt': a message has the role 'asistant'; expected one of system, user, assistant, tool",
        ),
        ([{"prompt": [{"role": "user"}], "answer": 1}], {}, "row 1: column 'prompt': expected a message with a role"),
        (
            [{"prompt": user("a"), "answer": 1}],
            {"chat": False},
            "row 1: column 'prompt': the prompt is a list of messages",
        ),
        (
            [{"prompt": "a", "answer": {"b": 1}}],
            {},
            "row 1: column 'answer': expected text, a number or a list of them",
        ),
        ([{"prompt": "a", "answer": []}], {}, "expected text, a number or a list of them, got []"),
        ([{"prompt": "a", "answer": ["b", None]}], {}, "expected text, a number or a list of them, got ['b', None]"),
        ([{"a": {"b": 1}, "answer": 1}], {"prompt_template": "{a[c]}"}, "row 1: data.prompt_template does not fit"),
        (
            [{"prompt": "a", "answer": 1}, {"prompt": "ab\ud83d", "answer": 1}],
            {},
            r"row 2: column 'prompt': half of a surrogate pair, '\ud83d', at character 3",
        ),
        ([{"prompt": "a\ud83d", "answer": 1}], {"chat": False}, "row 1: column 'prompt': half of a surrogate pair"),
        ([{"prompt": user("\udc00"), "answer": 1}], {}, "row 1: column 'prompt': half of a surrogate pair"),
        ([{"prompt": "a", "answer": "\ud83d"}], {}, "row 1: column 'answer': half of a surrogate pair"),
        ([{"prompt": "a", "answer": ["b", "\ud83d"]}], {}, "row 1: column 'answer': half of a surrogate pair"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, settings, expected):
    assert expected in refusal(jsonl(tmp_path / "rows.jsonl", *rows), **settings)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "rows.jsonl:3: not JSON"),
        ("rows.jsonl", '["a"]\n', "rows.jsonl:1: expected a JSON object"),
        ("rows.jsonl", "\n", "rows.jsonl: holds no examples"),
        ("rows.csv", "prompt,answer\n", "rows.csv: holds no examples"),
        ("rows.csv", "prompt,answer\na,b\nc\n", "rows.csv:3: expected 2 fields"),
        ("rows.csv", "prompt,answer\na,b,c\n", "rows.csv:2: expected 2 fields"),
        ("rows.csv", 'prompt,answer\na,"b\n', "not CSV"),
        ("rows.txt", "a\n", "rows.txt: cannot tell its format"),
    ],
)
def test_bad_files_are_named_with_their_line(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert expected in refusal(str(path))


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert "is not UTF-8 text" in refusal(str(path))


def test_a_missing_file_names_the_nearest_and_the_folder(tmp_path):
    jsonl(tmp_path / "rows.jsonl", {"prompt": "a"})
    message = refusal(str(tmp_path / "row.jsonl"))
    assert "there is no such file" in message
    assert f"Did you mean {tmp_path / 'rows.jsonl'}?" in message


def test_an_unknown_task_names_the_nearest():
    assert "Did you mean builtin:arithmetic?" in refusal("builtin:aritmetic")


def test_holding_everything_out_is_refused(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", {"prompt": "a", "answer": "b"})
    assert "holding 1 out of 1 examples leaves none to train on" in refusal(path, eval_size=1)
