"""JSON that fits a schema, in what models write."""

import json

import pytest

from bridge.errors import ConfigError
from trainer_env import rewards
from trainer_env.config import RewardConfig
from trainer_env.rewards.completions import last_block
from trainer_env.rewards.reward_errors import RewardError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def load(schema, **args):
    return rewards.load([RewardConfig(function="json_schema", args={"schema": schema, **args})])[0]


def pay(completion, schema=PERSON, **args):
    return load(schema, **args)(["p"], [completion])[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"name": "Ada"}', 1.0),
        (' \n{"name": "Ada", "age": 36}\n', 1.0),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada", "other": 1}', 0.25),
        ("[]", 0.25),
        ("null", 0.25),
        ("", 0.0),
        ("Ada", 0.0),
        ('Here: {"name": "Ada"}', 0.0),
        ('{"name": "Ada"', 0.0),
        ("NaN", 0.0),
        ('{"name": Infinity}', 0.0),
        ("[" * 200_000, 0.0),
        ("[" * 200_000 + "]" * 200_000, 0.0),
        ("9" * 5000, 0.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        ('First ```\n```json\n{"name": 1}\n```\nor rather\n```json\n{"name": "Ada"}\n```\nDone.', 1.0),
        ('```json\n{"name": "Ada"}', 1.0),
        ('```python\n{"name": "Ada"}\n```', 0.0),
        ('{"name": "\ud800"}', 1.0),
        ([{"role": "assistant", "content": '{"name": "Ada"}'}], 1.0),
    ],
)
def test_what_is_paid(completion, expected):
    assert pay(completion, parses=0.25) == expected


def test_without_partial_credit_other_json_is_worth_nothing():
    assert pay("[]") == 0.0


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "[1e999]"])
def test_a_number_beyond_a_floats_range_is_other_json(number):
    schema = {"multipleOf": 0.1, "items": {"multipleOf": 0.1}}
    assert pay(number, schema=schema, parses=0.25) == 0.25


@pytest.mark.parametrize("draft", ["http://json-schema.org/schema#", "https://example.org/mine", ""])
def test_an_unknown_draft_is_read_as_the_newest(draft):
    schema = {"$schema": draft, "$defs": {"few": {"maximum": 3}}, "prefixItems": [{"$ref": "#/$defs/few"}]}
    assert pay("[3]", schema=schema) == 1.0
    assert pay("[4]", schema=schema) == 0.0


def test_a_reference_among_values_is_a_value():
    value = {"$ref": "#/nowhere"}
    schema = {
        "enum": [value],
        "default": value,
        "examples": [value],
        "properties": {"$ref": {"const": value["$ref"]}, "enum": {"const": value}},
    }
    assert pay(json.dumps(value), schema=schema) == 1.0


def test_a_schema_can_be_a_file_and_name_its_draft(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(
        json.dumps({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True})
    )
    assert pay("4", schema=str(path)) == 1.0
    assert pay("3", schema=str(path)) == 0.0


def test_references_inside_of_the_schema_work():
    schema = {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, "$ref": "#/$defs/node"}
    assert pay("[[], [[]]]", schema=schema) == 1.0
    assert pay("[[], [1]]", schema=schema) == 0.0
    # Deeper than the validator goes.
    assert pay("[" * 900 + "]" * 900, schema=schema) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"schema": {"type": "objekt"}}, "rewards.0.args: json_schema: schema: $.type: 'objekt' is not valid"),
        ({"schema": {"$ref": "http://127.0.0.1:9/x.json"}}, "'http://127.0.0.1:9/x.json' leads nowhere in the schema"),
        ({"schema": {"items": [{}]}}, "$.items"),
        ({"schema": {"items": {"$ref": "other.json#/x"}}}, "'other.json#/x' leads nowhere"),
        ({"schema": {"items": {"$ref": "#/$defs/gone"}}}, "'#/$defs/gone' leads nowhere"),
        ({"schema": {"properties": {"default": {"$ref": "#/gone"}}}}, "'#/gone' leads nowhere"),
        ({"schema": {"$schema": 3}}, "$.$schema: expected text, got 3"),
        ({"schema": {"$schema": [3]}}, "$.$schema: expected text, got [3]"),
        ({"schema": "nowhere.json"}, "nowhere.json: No such file"),
        ({"schema": 3}, "expected a JSON object, got 3"),
        ({"schema": {}, "parses": 2}, "parses: expected a share from 0 to 1, got 2"),
        ({}, "json_schema needs schema"),
        ({"schema": {}, "pases": 1}, "Did you mean 'parses'?"),
    ],
)
def test_a_bad_schema_is_refused_when_it_is_loaded(args, expected):
    with pytest.raises(ConfigError) as refused:
        rewards.load([RewardConfig(function="json_schema", args=args)])
    assert expected in str(refused.value)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"schema\.json: not JSON"):
        load(str(path))


def test_a_reference_that_only_scoring_finds_is_named_and_nothing_is_fetched():
    schema = {"properties": {"a": {"$id": "http://127.0.0.1:9/a", "$ref": "gone.json"}}}
    with pytest.raises(RewardError, match=r"a reference that leads nowhere: .*gone\.json, for row 1"):
        load(schema)(["p", "q"], ["{}", '{"a": 1}'])


def test_the_last_block_of_a_language_is_found():
    text = "```py\na\n```\n ```Python \nb\n c\n ```\n```\nplain\n```\n```json\n{}\n```"
    assert last_block(text, ("python", "py")) == "b\n c\n"
    assert last_block(text, ("",)) == "plain\n"
    assert last_block(text, ("rust",)) is None
    assert last_block("```py\nunfinished", ("py",)) == "unfinished"
    assert last_block("```py\n" * 50_000, ("py",)) == "```py\n" * 49_999
