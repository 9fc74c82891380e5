"""Whatever is wrong in a configuration, the error names the file, the key, what was expected and the nearest name."""

import datetime as dt
from typing import Annotated, Any, Literal

import msgspec
import pytest

from bridge.errors import ConfigError
from bridge.settings import apply_overrides, decode_dict, decode_toml, nearest, problems


class Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class Leaf(Section, frozen=True, kw_only=True):
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    mode: Literal["fast", "slow"] = "fast"
    count: Annotated[int, msgspec.Meta(ge=2)] = 2
    names: tuple[str, ...] = ()
    table: dict[str, int] = {}


class Local(Section, frozen=True, kw_only=True, tag="local", tag_field="kind"):
    folder: str = ""


class Remote(Section, frozen=True, kw_only=True, tag="remote", tag_field="kind"):
    host: str = ""


class Root(Section, frozen=True, kw_only=True):
    need: int
    leaf: Leaf = Leaf()
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, Leaf] = {}
    pair: tuple[int, str] = (1, "a")
    nested: tuple[tuple[int, ...], ...] = ()
    maybe: int | None = None
    maybe_leaf: Leaf | None = None
    either: int | str = 1
    checkpointing: bool | Literal["unsloth"] = True
    levels: tuple[Literal[1, 2], ...] = ()
    place: Local | Remote = Local()
    name: Annotated[str, msgspec.Meta(min_length=1, pattern="^[a-z]+$")] = "a"
    class_: int = msgspec.field(default=1, name="class")
    anything: dict[str, Any] = {}
    when: dt.date | None = None

    def __post_init__(self):
        if self.need == 13:
            raise ValueError("need must not be 13")


# text of the file: the key that the error names, what it says, what the remedy offers
WRONG = {
    "unknown key": ("nede = 1", "nede", "no such key", "need?"),
    "unknown key, nothing like it": ("need = 1\nxyzzy = 1", "xyzzy", "no such key", "leaf, leaves"),
    "unknown key in a section": ("need = 1\nleaf.wieght = 1", "leaf.wieght", "no such key", "leaf.weight?"),
    "unknown key in an optional section": (
        "need = 1\nmaybe_leaf.wieght = 1",
        "maybe_leaf.wieght",
        "no such key",
        "maybe_leaf.weight?",
    ),
    "unknown key in a list of sections": (
        "need = 1\n[[leaves]]\n[[leaves]]\nwieght = 1",
        "leaves[1].wieght",
        "no such key",
        "leaves[1].weight?",
    ),
    "unknown key in a table of sections": (
        "need = 1\n[by_name.a]\n[by_name.b]\nwieght = 1",
        "by_name.b.wieght",
        "no such key",
        "by_name.b.weight?",
    ),
    "unknown key in a union of sections": (
        "need = 1\nplace = {kind = 'remote', hots = 'x'}",
        "place.hots",
        "no such key",
        "place.host?",
    ),
    "unknown key near a renamed one": ("need = 1\nclas = 1", "clas", "no such key", "class?"),
    "unknown key with a dot": ("need = 1\nleaf.'a.b' = 1", 'leaf."a.b"', "no such key", "leaf."),
    "unknown key with a backtick": ("need = 1\n'we`ird' = 1", '"we`ird"', "no such key", ""),
    "missing key": ("leaf = {}", "need", "missing", ""),
    "missing tag of a union": ("need = 1\nplace = {folder = 'x'}", "place.kind", "missing", ""),
    "wrong type": ("need = 'x'", "need", "expected int, got str ('x')", ""),
    "a bool is no int": ("need = true", "need", "expected int, got bool (True)", ""),
    "a fraction is no int": ("need = 1.5", "need", "expected int, got float (1.5)", ""),
    "a quoted number is no number": (
        "need = 1\nleaf.weight = '1.0'",
        "leaf.weight",
        "expected float, got str ('1.0')",
        "",
    ),
    "a section in place of a value": ("need = {a = 1}", "need", "expected int, got table", ""),
    "a value in place of a section": ("need = 1\nleaf = 3", "leaf", "expected table, got int (3)", ""),
    "a value in place of a list": ("need = 1\nleaf.names = 'a'", "leaf.names", "expected array, got str ('a')", ""),
    "a section in place of a list": ("need = 1\nleaves = {}", "leaves", "expected array, got table", ""),
    "a list in place of a section": ("need = 1\nleaf = []", "leaf", "expected table, got array", ""),
    "wrong type in a list": ("need = 1\nleaf.names = ['a', 3]", "leaf.names[1]", "expected str, got int (3)", ""),
    "wrong type in a list of lists": ("need = 1\nnested = [[1], [2, 'x']]", "nested[1][1]", "got str ('x')", ""),
    "wrong type in a table": ("need = 1\nleaf.table = {a = 1, b = 'x'}", "leaf.table.b", "got str ('x')", ""),
    "wrong type in a pair": ("need = 1\npair = [1, 2]", "pair[1]", "expected str, got int (2)", ""),
    "wrong length of a pair": ("need = 1\npair = [1]", "pair", "length 2, got 1", ""),
    "wrong type for a union": ("need = 1\neither = 1.5", "either", "expected int | str, got float (1.5)", ""),
    "wrong type for an optional": ("need = 1\nmaybe = 'x'", "maybe", "expected int, got str ('x')", ""),
    "too small": ("need = 1\nleaf.weight = 0", "leaf.weight", "expected float > 0.0, got 0", ""),
    "too small in a table of sections": (
        "need = 1\nby_name.'a.b'.count = 1",
        'by_name."a.b".count',
        "expected int >= 2, got 1",
        "",
    ),
    "not a number": ("need = 1\nleaf.weight = nan", "leaf.weight", "expected float > 0.0, got nan", ""),
    "too short": ("need = 1\nname = ''", "name", "length >= 1, got ''", ""),
    "wrong pattern": ("need = 1\nname = 'A'", "name", "matching regex '^[a-z]+$', got 'A'", ""),
    "none of the choices": ("need = 1\nleaf.mode = 'slwo'", "leaf.mode", "'fast' or 'slow', got 'slwo'", "'slow'"),
    "none of the choices, nothing like it": (
        "need = 1\nleaf.mode = 'zzz'",
        "leaf.mode",
        "'fast' or 'slow', got 'zzz'",
        "fast, slow",
    ),
    "none of the numbers": ("need = 1\nlevels = [1, 3]", "levels[1]", "expected 1 or 2, got 3", "1, 2"),
    "neither a bool nor the word": (
        "need = 1\ncheckpointing = 'unslot'",
        "checkpointing",
        "'unsloth' or true or false, got 'unslot'",
        "'unsloth'",
    ),
    "wrong type for a choice": ("need = 1\nleaf.mode = 3", "leaf.mode", "got int (3)", "fast, slow"),
    "wrong tag of a union": (
        "need = 1\nplace = {kind = 'remot'}",
        "place.kind",
        "'local' or 'remote', got 'remot'",
        "'remote'",
    ),
    "a date in a free table": (
        "need = 1\nanything.since = 2026-01-02",
        "anything.since",
        "expected no date or time, got 2026-01-02",
        'as text: "2026-01-02"',
    ),
    "a time deep in a free table": (
        "need = 1\nanything.'a.b' = [1, {at = [07:30:00]}]",
        'anything."a.b"[1].at[0]',
        "expected no date or time, got 07:30:00",
        "as text",
    ),
    "a date and time in a free table": (
        "need = 1\nanything.since = 2026-01-02T07:30:00Z",
        "anything.since",
        "got 2026-01-02 07:30:00+00:00",
        "as text",
    ),
    "wrong together": ("need = 13", "the file", "need must not be 13", ""),
}


@pytest.mark.parametrize(("text", "key", "says", "offers"), WRONG.values(), ids=WRONG.keys())
def test_an_error_names_file_key_expectation_and_nearest_name(tmp_path, text, key, says, offers):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        decode_toml(path, Root)
    assert caught.value.what.startswith(f"{path}: {key}: ")
    assert says in caught.value.what
    assert offers in caught.value.remedy


def test_a_right_file_becomes_the_struct(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        """
        need = 1
        maybe = 4
        either = "x"
        checkpointing = "unsloth"
        levels = [2, 1]
        when = 2026-01-02
        place = {kind = "remote", host = "h"}
        class = 9
        anything = {deep = {er = [1, "x", true]}}
        [leaf]
        weight = 2
        [[leaves]]
        mode = "slow"
        [by_name.x]
        count = 3
        """
    )
    assert decode_toml(path, Root) == Root(
        need=1,
        maybe=4,
        either="x",
        checkpointing="unsloth",
        levels=(2, 1),
        when=dt.date(2026, 1, 2),
        place=Remote(host="h"),
        class_=9,
        anything={"deep": {"er": [1, "x", True]}},
        leaf=Leaf(weight=2.0),
        leaves=(Leaf(mode="slow"),),
        by_name={"x": Leaf(count=3)},
    )


def test_a_missing_file_is_named_with_its_nearest_neighbour(tmp_path):
    (tmp_path / "demo.toml").write_text("")
    with pytest.raises(ConfigError, match="no such file") as caught:
        decode_toml(tmp_path / "dmeo.toml", Root)
    assert str(tmp_path / "demo.toml") in caught.value.remedy


def test_a_missing_directory_is_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        decode_toml(tmp_path / "nowhere" / "demo.toml", Root)


@pytest.mark.parametrize("content", [b"need = ", b"need = 1\nneed = 2", b"\xff\xfe", b"[leaf", b"\x00"])
def test_what_is_no_toml_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a TOML file") as caught:
        decode_toml(path, Root)
    assert str(path) in caught.value.what


def test_a_directory_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        decode_toml(tmp_path, Root)


def test_plain_data_gets_the_same_checks():
    with pytest.raises(ConfigError, match=r"server\.toml: leaf\.count: expected int >= 2, got 1"):
        decode_dict({"need": 1, "leaf": {"count": 1}}, Root, "server.toml")


def test_a_date_is_a_problem_among_others():
    data = {"needs": 1, "anything": {"a": dt.date(2026, 1, 2), "b": dt.time(7)}, "when": dt.date(2026, 1, 2)}
    found = problems(data, Root, "x")
    assert [error.what.split(":")[1].strip() for error in found] == ["needs", "need", "anything.a", "anything.b"]


OVERRIDES = {
    "a=1": {"a": 1},
    "a=-1e-4": {"a": -1e-4},
    "a=true": {"a": True},
    "a='1'": {"a": "1"},
    'a="x y"': {"a": "x y"},
    "a=bare-word": {"a": "bare-word"},
    "a=Qwen/Qwen3-0.6B": {"a": "Qwen/Qwen3-0.6B"},
    "a=builtin:tiny": {"a": "builtin:tiny"},
    "a=": {"a": ""},
    "a=b=c": {"a": "b=c"},
    "a=[1, 2]": {"a": [1, 2]},
    "a={b = 1}": {"a": {"b": 1}},
    "a=inf": {"a": float("inf")},
    " a = 1 ": {"a": 1},
    "a=2026-01-02": {"a": dt.date(2026, 1, 2)},
    "a=1\nb = 2": {"a": "1\nb = 2"},
    "a.b.c=1": {"a": {"b": {"c": 1}}},
}


@pytest.mark.parametrize(("override", "result"), OVERRIDES.items(), ids=OVERRIDES.keys())
def test_an_override_takes_toml_values_and_bare_words(override, result):
    assert apply_overrides({}, [override]) == result


def test_an_override_changes_what_it_names_and_nothing_else():
    data = {"a": {"b": 1, "c": 2}, "list": [{"x": 1}, {"x": 2}]}
    assert apply_overrides(data, ["a.b=3", "list.1.x=4"]) == {
        "a": {"b": 3, "c": 2},
        "list": [{"x": 1}, {"x": 4}],
    }


def test_overrides_leave_the_original_alone():
    data = {"a": {"b": 1}, "list": [1, 2]}
    apply_overrides(data, ["a.b=3", "list.0=9"])
    assert data == {"a": {"b": 1}, "list": [1, 2]}


def test_the_last_override_wins():
    assert apply_overrides({}, ["a=1", "a=2"]) == {"a": 2}


@pytest.mark.parametrize("override", ["a", "=1", " = 1", "a.b.c=1", "list.x=1", "list.2=1", "list.-1=1", "list.0.x=1"])
def test_an_override_that_reaches_nothing_is_refused_by_name(override):
    with pytest.raises(ConfigError) as caught:
        apply_overrides({"a": {"b": 1}, "list": [1, 2]}, [override])
    assert f"--set {override}" in caught.value.what


def test_an_override_is_checked_like_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("need = 1")
    assert decode_toml(path, Root, ["leaf.count=5"]).leaf.count == 5
    with pytest.raises(ConfigError) as caught:
        decode_toml(path, Root, ["leaf.cuont=5"])
    assert "leaf.count?" in caught.value.remedy


def test_the_nearest_name_is_offered_only_when_there_is_one():
    assert nearest("tempreature", ["temperature", "top_p"]) == "temperature"
    assert nearest("zzz", ["temperature", "top_p"]) == ""
