"""An error says the same on the other side of the wire, in another process, and to the person who reads it."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge import errors
from bridge import protocol as p
from bridge.errors import BridgeError, Failure, from_failure, to_failure


def tree(cls: type[BridgeError] = BridgeError) -> list[type[BridgeError]]:
    """BridgeError and everything below it that the bridge knows. A half's own errors stay on their side."""
    known = [sub for sub in cls.__subclasses__() if sub.__module__ == errors.__name__]
    return [cls, *(below for sub in known for below in tree(sub))]


FULL = {"why": "a cause", "log_path": "/runs/x/engine.log", "log_tail": "line 1\nline 2\n", "remedy": "a remedy"}
FIELDS = ("what", "why", "log_path", "log_tail", "remedy")


def fields(error: BridgeError) -> list[str]:
    return [getattr(error, name) for name in FIELDS]


@pytest.mark.parametrize("cls", tree())
def test_every_error_crosses_the_wire(cls):
    error = cls("It broke.", **FULL)
    failure = p.decode_to_client(p.encode(to_failure(error)))
    assert isinstance(failure, Failure)
    back = from_failure(failure)
    assert type(back) is cls
    assert fields(back) == fields(error)


@pytest.mark.parametrize("cls", tree())
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_every_error_can_be_copied_and_pickled(cls, copied):
    error = cls("It broke.", **FULL)
    back = copied(error)
    assert type(back) is cls
    assert fields(back) == fields(error)
    assert str(back) == str(error)


def test_every_error_has_a_code_of_its_own():
    codes = [cls.code for cls in tree()]
    assert len(set(codes)) == len(codes)


def test_the_text_has_the_cause_the_log_and_the_remedy():
    text = str(errors.EngineFailed("The engine died.", **FULL))
    for part in ("The engine died.", "a cause", "line 1\nline 2", "/runs/x/engine.log", "a remedy"):
        assert part in text


def test_the_text_says_no_more_than_is_known():
    assert str(errors.Busy("Full.")) == "Full."


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.Timeout, TimeoutError),
        (errors.PeerDied, ConnectionError),
        (errors.Refused, ValueError),
        (errors.StaleVersion, errors.Refused),
        (errors.EngineFailed, RuntimeError),
        (errors.ConfigError, ValueError),
    ],
)
def test_an_error_is_also_what_the_standard_library_would_raise(cls, builtin):
    with pytest.raises(builtin):
        raise cls("It broke.")


def test_an_unknown_code_becomes_the_base_error():
    back = from_failure(Failure("from-the-future", "It broke.", remedy="wait"))
    assert type(back) is BridgeError
    assert (back.what, back.remedy) == ("It broke.", "wait")


@given(st.text(st.characters()))
def test_any_text_crosses_the_wire_even_a_file_name_that_is_no_unicode(text):
    back = p.decode_to_client(p.encode(to_failure(BridgeError(text, log_path=text))))
    assert isinstance(back, Failure)
    assert back.what == text.encode(errors="backslashreplace").decode()
