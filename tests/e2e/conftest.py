"""One lab for all tests of whole runs: what they need begins early, and nobody of it may live after a test."""

from pathlib import Path

import pytest

from runs import SCENARIOS, Lab

WANTED = pytest.StashKey[list[str]]()


def pytest_collection_finish(session):
    names = [name for item in session.items for name in _mentioned(item)]
    session.config.stash[WANTED] = list(dict.fromkeys(name for name in names if name in SCENARIOS))


def _mentioned(item):
    """The fixtures that a test asks for, by their names or through a parameter. One that is skipped asks for none."""
    if any(marker.args[0] for marker in item.iter_markers("skipif")):
        return []
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))  # The first test waits for runs that began with the session.


@pytest.fixture(scope="session")
def lab(request, tmp_path_factory):
    it = Lab(tmp_path_factory.mktemp("lab"))
    for name in request.config.stash[WANTED]:
        it.begin(name)
    yield it
    it.close()


@pytest.fixture
def run(request):
    """What the scenario that the parameter names came to."""
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def nothing_lives_on(lab):
    """Of a command that has ended, nobody lives."""
    yield
    ended = [run for run in lab.runs if run.code is not None and not run.expected_to_live]
    alive = {run.mark: run.living() for run in ended}
    assert not any(alive.values()), alive
