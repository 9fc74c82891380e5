"""Code that a model wrote, run with its example's tests: what passes is paid, and what it starts ends with it."""

import gc
import json
import os
import time
from pathlib import Path

import pytest

from bridge.errors import ConfigError
from trainer_env import rewards
from trainer_env.config import RewardConfig
from trainer_env.rewards.reward_errors import RewardError

TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'", "assert add(2, 2) == 4"]
ADD = "def add(a, b):\n    return a + b\n"


def load(**args):
    (reward,) = rewards.load([RewardConfig(function="code_execution", args={"seconds": 60.0, **args})])
    return reward


def pay(completion, tests=TESTS, **args):
    return load(**args)(["p"], [completion], tests=[tests])[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (ADD, 1.0),
        (f"Sure:\n```python\n{ADD}```\nIt adds.", 1.0),
        (f"```python\ndef add(a, b): return 0\n```\nBetter:\n```python\n{ADD}```", 1.0),
        (f"```python\n{ADD}", 1.0),
        ("1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", 1.0),
        (f"```python {{.numberLines}}\n{ADD}```", 1.0),
        ([{"role": "assistant", "content": ADD}], 1.0),
        ("def add(a, b):\n    return int(a) + int(b)", 0.75),
        ("def add(a, b):\n    return 3", 0.25),
        ("I cannot do that.", 0.0),
        ("", 0.0),
        ("def add(a, b):\n  return a +", 0.0),
        ("raise SystemExit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        (f"{ADD}\nif __name__ == '__main__':\n    input()", 1.0),
        (f"{ADD}\nprint('x' * 10**6)", 1.0),
        (f"{ADD}\nimport sys\nsys.stderr.write('x' * 10**6)", 1.0),
        ("(" * 100_000, 0.0),
        ("x = '\ud800'", 0.0),
        ("\x00", 0.0),
        ("def add(a, b):\n    raise KeyboardInterrupt", 0.0),
        ("import time, os\nfor fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\n" + ADD, 0.0),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1\\n' * 9)\n    except OSError: pass\n", 0.0),
    ],
)
def test_the_share_of_tests_that_pass_is_paid(completion, expected):
    assert pay(completion) == expected


def test_all_or_nothing():
    assert pay("def add(a, b):\n    return int(a) + int(b)", all_or_nothing=True) == 0.0
    assert pay(ADD, all_or_nothing=True) == 1.0


def test_tests_as_one_text_count_their_asserts():
    tests = "import math\nexpected = 3\nassert add(1, 2) == expected\nassert add(1, 1) == math.inf, 'no'\n"
    assert pay(ADD, tests) == 0.5
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0\n\ncheck(add)\n"
    assert pay(ADD, check) == 1.0
    assert pay("def add(a, b): return 3", check) == 0.0
    assert pay(ADD, "from solution import add as sum_of\nassert sum_of(1, 2) == 3") == 1.0


def test_what_asserts_in_a_text_is_a_test_whatever_statement_it_stands_in():
    wrong = "def add(a, b): return 99"
    loop = "assert True\nfor at in range(3):\n    assert add(at, 1) == at + 1"
    call = "def check(it):\n    assert it(1, 2) == 3\n\nassert callable(add)\ncheck(add)"
    for tests in (loop, call):
        assert pay(ADD, tests) == 1.0
        assert pay(wrong, tests) == 0.5
    assert pay(wrong, "if add(1, 2) == 3:\n    pass\nelse:\n    raise ValueError") == 0.0


@pytest.mark.parametrize("tests", [str(TESTS), json.dumps(TESTS)])
def test_a_list_that_a_text_holds_is_a_list_of_tests(tests):
    assert pay("def add(a, b):\n    return int(a) + int(b)", tests) == 0.75


@pytest.mark.parametrize(
    "tests",
    [
        "def check(it):\n    assert it(1, 2) == 3",
        ["def test_add():\n    assert add(1, 2) == 3"],
        [TESTS[0], "add(1, 2) == 3"],
        "import unittest\n\nclass Test(unittest.TestCase):\n    def test(self):\n        assert add(1, 2) == 3",
        "if __name__ == '__main__':\n    assert add(1, 2) == 3",
        "'add(1, 2) == 3'",
        "[1, 2]",
        "# add(1, 2) == 3",
    ],
)
def test_tests_that_any_code_passes_are_refused(tests):
    with pytest.raises(RewardError, match=r"(?s)tests.*for row 1\.\n  prompt: 'q'"):
        load()(["p", "q"], [ADD, ADD], tests=[TESTS, tests])


@pytest.mark.parametrize("tests", [None, "", " ", [], ["a", 1], 3, "assert (", "x" + "("])
def test_an_example_without_tests_is_named(tests):
    with pytest.raises(RewardError, match=r"(?s)tests.*for row 1\.\n  prompt: 'q'"):
        load()(["p", "q"], ["a", "b"], tests=[TESTS, tests])


def test_a_missing_column_and_bad_limits_are_named():
    with pytest.raises(RewardError, match="there is no column 'checks' with tests"):
        load(tests_column="checks")(["p"], ["a"], tests=[TESTS])
    with pytest.raises(ConfigError, match="expected seconds above 0"):
        load(seconds=0)


def test_what_does_not_end_is_ended_and_keeps_what_had_passed():
    loops = [
        "while True: pass",
        "import time\ntime.sleep(3600)",
        "import signal\nsignal.pthread_sigmask(2, range(1, 65))\nwhile True: pass",
    ]
    codes = [f"{ADD}\ndef spin():\n    " + loop.replace("\n", "\n    ") for loop in loops]
    tests = [[TESTS[0], "spin()", TESTS[1]]] * 3
    assert load(seconds=10.0, parallel=3)(["p"] * 3, codes, tests=tests) == [pytest.approx(1 / 3)] * 3


@pytest.mark.parametrize(
    "cheat",
    [
        "import glob\nfor name in glob.glob('*'): open(name, 'w').close()",
        "import os\nfor at in range(9): open(f'step_{at}.py', 'w').close()",
        "import os\nos.truncate(0, 0)",
        "import os\nos.lseek(0, 0, 0)\nif b'add' in os.read(0, 9999):\n    def add(a, b): return {1: 3, 2: 4}[a]",
    ],
)
def test_a_solution_cannot_reach_its_tests_through_files(cheat):
    assert pay(cheat) == 0.0


def test_memory_and_files_are_bounded():
    assert pay("big = bytearray(2**31)", ["assert big"], memory_mib=256) == 0.0
    write = "def write(size):\n    with open('f', 'wb') as file:\n        file.write(bytes(size))\n"
    assert pay(write, ["write(2**20)", "write(2**25)"]) == 0.5


def test_it_starts_with_an_empty_folder_no_environment_and_no_input(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "s3cret")
    code = f"""
import os, sys
def folder(): return os.listdir()
def variables(): return dict(os.environ)
def keep(): open({str(tmp_path / "cwd")!r}, "w").write(os.getcwd())
"""
    tests = [
        "assert folder() == []",
        "assert 'SECRET' not in variables() and 'HOME' not in variables()",
        "assert sys.stdin.read() == ''",
        "assert not any('site-packages' in path for path in sys.path)",
        "keep()",
    ]
    assert pay(code, tests) == 1.0
    folder = Path((tmp_path / "cwd").read_text())
    assert folder != Path.cwd()
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel does not let other users' code start a process at all")
def test_processes_that_it_starts_end_with_it(tmp_path):
    code = f"""
import os, time
def start():
    pid = os.fork()
    if pid == 0:
        time.sleep(3600)
    open({str(tmp_path / "pid")!r}, "w").write(str(pid))
"""
    assert pay(code, ["start()"]) == 1.0
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 90
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_completions_run_at_the_same_time_and_keep_their_order(tmp_path):
    meet = f"""
import pathlib, time
here, there = pathlib.Path({str(tmp_path)!r}, NAME), pathlib.Path({str(tmp_path)!r}, OTHER)
here.touch()
while not there.exists(): time.sleep(0.01)
"""
    codes = [meet.replace("NAME", repr(a)).replace("OTHER", repr(b)) for a, b in (("a", "b"), ("b", "a"))]
    assert load(parallel=2)(["p"] * 3, [*codes, "boom"], tests=[["assert here.exists()"]] * 3) == [1.0, 1.0, 0.0]


def test_nothing_is_left_open_or_behind():
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    load(parallel=2, seconds=2.0)(
        ["p"] * 4, [ADD, "(", "import os; os._exit(1)", "while True: pass"], tests=[TESTS] * 4
    )
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
