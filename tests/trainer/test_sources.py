"""Datasets that need the trainer's environment: Parquet files, and folders that the datasets library reads."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from bridge.errors import ConfigError
from trainer_env import data
from trainer_env.config import DataConfig

ROWS = [{"question": f"{n}?", "label": n, "tags": ["a", "b"]} for n in range(6)]


def load(source, **settings):
    config = DataConfig(source=str(source), prompt_column="question", answer_column="label", **settings)
    return data.load(config, seed=0)


def test_a_parquet_file_is_read(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    loaded = load(path, eval_size=2)
    assert len(loaded.train) == 4
    assert loaded.train[0].columns["tags"] == ["a", "b"]


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_text("no")
    with pytest.raises(ConfigError, match=r"rows\.parquet: not a Parquet file"):
        load(path)


@pytest.fixture
def dataset(tmp_path):
    """A folder in the layout of a hub dataset with two splits."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_dataset_brings_its_own_evaluation_split(dataset):
    loaded = load(dataset, eval_split="test")
    assert [example.answer for example in loaded.train] == ["0", "1", "2", "3"]
    assert [example.answer for example in loaded.evaluation] == ["4", "5"]


def test_an_unknown_split_is_named(dataset):
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*valid"):
        load(dataset, split="valid")


def test_a_dataset_with_a_script_is_refused(dataset):
    Path(dataset, "dataset.py").write_text("raise SystemExit\n")
    with pytest.raises(ConfigError, match=r"dataset' cannot be loaded: .*script"):
        load(dataset)


def test_a_dataset_with_a_broken_file_is_named(dataset):
    Path(dataset, "train.jsonl").write_text('{"question": \n')
    with pytest.raises(ConfigError, match=r"dataset' cannot be loaded: "):
        load(dataset)


def test_an_error_without_words_is_called_by_its_kind(monkeypatch):
    def fail(*_, **__):
        raise TimeoutError

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(ConfigError, match="cannot be loaded: TimeoutError"):
        load("some/name")


def test_a_dataset_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"data\.source 'nobody/nothing-here' cannot be loaded"):
        load("nobody/nothing-here")


def test_answers_of_a_parquet_file_can_be_any_plain_value_or_several(tmp_path):
    path = tmp_path / "rows.parquet"
    values = {
        "label": [[1, 2], [3]],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "day": [date(2026, 1, 2), date(2026, 1, 3)],
        "good": [True, False],
    }
    table = pa.table({"question": [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]], **values})
    parquet.write_table(table, path)

    def answers(column):
        config = DataConfig(source=str(path), prompt_column="question", answer_column=column, eval_size=0)
        return [example.answer for example in data.load(config, seed=0).train]

    assert answers("label") == [["1", "2"], ["3"]]
    assert answers("price") == ["1.50", "2.00"]
    assert answers("day") == ["2026-01-02", "2026-01-03"]
    assert answers("good") == ["True", "False"]
