"""Rewards of a batch: all at once, each within its limit, and a hang or a fault named with its sample."""

import _thread
import contextvars
import faulthandler
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest

from trainer_env import rewards
from trainer_env.config import RewardConfig
from trainer_env.rewards import Reward, daemons, reward_pool
from trainer_env.rewards.completions import RowError, bounded
from trainer_env.rewards.reward_errors import RewardError

HANG = threading.Event()
"""Never set: what waits for it hangs."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """A search that comes to its end may take long, and the process is not ended because it stood still."""
    monkeypatch.setattr(reward_pool, "SEARCH_S", 60.0)
    monkeypatch.setattr(reward_pool, "LOCKED_S", 600.0)


@pytest.fixture
def short_search(monkeypatch):
    """For a search that meets a hang."""
    monkeypatch.setattr(reward_pool, "SEARCH_S", 1.0)


def waiting_for(barrier, pay):
    def function(*, completions, **_):
        barrier.wait(90)
        return [pay] * len(completions)

    return function


def test_all_rewards_of_a_batch_run_at_the_same_time():
    barrier = threading.Barrier(3)
    three = [Reward(f"r{pay}", waiting_for(barrier, pay)) for pay in (1.0, 2.0, 3.0)]
    scores = rewards.score(three, ["p"], ["c"])
    assert scores.each == {"r1.0": [1.0], "r2.0": [2.0], "r3.0": [3.0]}
    assert scores.total == [6.0]


def hang_on(*texts):
    def function(*, completions, **_):
        if set(completions) & set(texts):
            HANG.wait()
        return [1.0] * len(completions)

    return function


def failure(*several, completions=("good", "bad", "worse"), **columns):
    with pytest.raises(RewardError) as failed:
        rewards.score(several, ["p0", "p1", "p2"][: len(completions)], list(completions), **columns)
    return str(failed.value)


def test_a_hang_ends_within_the_limit_naming_the_reward_and_the_first_sample_it_hangs_on(short_search):
    message = failure(Reward("fine", lambda **_: [0.0] * 3), Reward("stuck", hang_on("bad", "worse"), timeout_s=0.2))
    assert "Reward 'stuck' did not return within 0.2 s, for row 1.\n  prompt: 'p1'\n  completion: 'bad'" in message
    assert "on 2 of 3 rows, each of them alone" in message
    assert "rewards.timeout_s" in message


def test_a_hang_that_needs_the_whole_batch_says_so():
    def function(*, completions, **_):
        if len(completions) > 1:
            HANG.wait()
        return [1.0]

    message = failure(Reward("stuck", function, timeout_s=0.2))
    assert "did not return within 0.2 s.\n" in message
    assert "Each of its 3 rows ends when it is run alone" in message


def test_a_reward_that_limits_each_row_itself_is_not_searched():
    calls = []

    @bounded
    def function(*, completions, **_):
        calls.append(len(completions))
        HANG.wait()
        return [0.0] * len(completions)

    message = failure(Reward("slow", function, timeout_s=0.2))
    assert "'slow' did not return within 0.2 s.\n" in message
    assert "3 of them take longer together" in message
    assert calls == [3]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("code_execution", {}),
        ("regex", {"pattern": "a"}),
        ("llm_judge", {"base_url": "http://127.0.0.1:9/v1", "model": "m", "prompt": "{completion}"}),
    ],
)
def test_built_in_rewards_that_limit_each_row_say_so(function, args):
    assert rewards.load([RewardConfig(function=function, args=args)])[0].bounded
    assert not rewards.load([RewardConfig(function="exact_match")])[0].bounded


def test_the_search_runs_a_few_rows_at_once_and_blames_none_that_had_no_time(monkeypatch):
    monkeypatch.setattr(reward_pool, "SEARCH_S", 2.0)
    lock, most, now = threading.Lock(), [0], [0]

    def function(*, completions, **_):
        if len(completions) > 1:
            HANG.wait()
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.1)
        with lock:
            now[0] -= 1
        return [0.0]

    reward = Reward("stuck", function, timeout_s=0.2)
    with pytest.raises(RewardError, match=r"did not return within 0.2 s\.\n.*\d+ of its 200 rows ends when"):
        reward(["p"] * 200, ["c"] * 200)
    assert most[0] <= reward_pool.SEARCH_AT_ONCE


def test_each_reward_has_a_limit_of_its_own(short_search):
    started = threading.Event()

    def slow(*, completions, **_):
        started.wait(90)
        time.sleep(1.2)
        return [1.0] * len(completions)

    def quick(*, completions, **_):
        started.set()
        return [2.0] * len(completions)

    both = [Reward("slow", slow, timeout_s=60), Reward("quick", quick, timeout_s=1.0)]
    assert rewards.score(both, ["p"], ["c"]).each == {"slow": [1.0], "quick": [2.0]}
    assert "'short' did not return" in failure(
        Reward("long", hang_on("bad"), timeout_s=600), Reward("short", hang_on("bad"), timeout_s=0.2)
    )


def test_a_fault_ends_the_batch_though_another_reward_hangs():
    def broken(**_):
        raise KeyError("nothing")

    assert "Reward 'broken' raised KeyError: 'nothing', for row 0." in failure(
        Reward("stuck", hang_on("good"), timeout_s=600), Reward("broken", broken)
    )


def alarmed(**_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def alarmed_in_other_words(**_):
    try:
        alarmed()
    except ValueError as error:
        raise ValueError("there is no support for threads") from error


def its_own_cause(**_):
    error = ValueError("in circles")
    raise error from error


@pytest.mark.parametrize("function", [alarmed, alarmed_in_other_words])
def test_a_limit_made_of_signals_is_told_what_to_do_in_a_thread(function):
    message = failure(Reward("r", function))
    assert "Reward 'r' raised ValueError: " in message
    assert "do: A reward runs in a thread of its own" in message
    assert "parsing_timeout=None" in message
    assert "do:" not in failure(Reward("r", lambda **_: [1 / 0]))
    assert "do:" not in failure(Reward("r", its_own_cause))


def test_a_fault_whose_search_hangs_is_told_without_a_sample(short_search):
    def function(*, completions, **_):
        if len(completions) > 1:
            raise ValueError("together")
        HANG.wait()
        return [0.0]

    assert "Reward 'r' raised ValueError: together.\n" in failure(Reward("r", function))


def test_a_fault_that_names_its_row_is_believed():
    calls = []

    def function(*, completions, **_):
        calls.append(len(completions))
        raise RowError(2, "no good")

    assert "Reward 'r': no good, for row 2.\n  prompt: 'p2'" in failure(Reward("r", function))
    assert calls == [3]


@pytest.mark.parametrize("leave", [sys.exit, _thread.exit])
def test_leaving_the_thread_is_a_fault(leave):
    assert "Reward 'r' raised SystemExit" in failure(Reward("r", lambda **_: leave()))


def test_columns_of_a_row_come_alone():
    def function(*, completions, level, shared, **_):
        assert shared == "all"
        return [1 / level[row] for row in range(len(completions))]

    message = failure(Reward("r", function), level=[1, 2, 0], shared="all")
    assert "ZeroDivisionError: division by zero, for row 2." in message


def test_the_callers_context_and_streams_are_the_rewards():
    variable = contextvars.ContextVar("variable", default="none")
    variable.set("mine")

    def function(*, completions, **_):
        print("seen", variable.get())
        return [0.0] * len(completions)

    with redirect_stdout(StringIO()) as out:
        Reward("r", function)(["p"], ["c"])
    assert out.getvalue() == "seen mine\n"


@pytest.fixture
def ctrl_c():
    """A test runner in the background, and pytest-xdist's, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_waiting_comes_through(ctrl_c):
    def function(**_):
        _thread.interrupt_main()
        HANG.wait()
        return [0.0]

    with pytest.raises(KeyboardInterrupt):
        Reward("r", function, timeout_s=60)(["p"], ["c"])


def run_script(body):
    return subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, timeout=400, check=False)


def test_the_process_exits_after_a_hang():
    ended = run_script("""
import time
from trainer_env.rewards import Reward, reward_pool
reward_pool.LOCKED_S = 600.0
def spin(**_):
    while True: pass
def sleep(**_):
    time.sleep(3600)
for function in (spin, sleep):
    try:
        Reward(function.__name__, function, timeout_s=0.2)(["p"], ["c"])
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
""")
    assert ended.stdout.splitlines() == [
        "RewardError Reward 'spin' did not return within 0.2 s, for row 0.",
        "RewardError Reward 'sleep' did not return within 0.2 s, for row 0.",
    ]
    assert ended.returncode == 0, ended.stderr


def test_a_function_that_keeps_pythons_lock_ends_the_process_with_its_stack():
    ended = run_script("""
import re
from trainer_env.rewards import reward_pool
from trainer_env.rewards import Reward
reward_pool.SEARCH_S, reward_pool.LOCKED_S = 0.3, 2.0
def backtrack(*, completions, **_):
    return [float(bool(re.search("(a+)+$", text))) for text in completions]
Reward("mine", backtrack, timeout_s=0.3)(["p"], ["a" * 60 + "b"])
""")
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in backtrack" in ended.stderr


def test_no_more_than_so_many_are_at_work_at_once_and_results_keep_their_order():
    lock, most, now = threading.Lock(), [0], [0]

    def work(item):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        return item * 2

    assert daemons.each(work, list(range(12)), 3) == [item * 2 for item in range(12)]
    assert most[0] <= 3
    assert daemons.each(work, [], 3) == []


def test_rewards_that_end_leave_those_of_another_thread_watched(monkeypatch):
    timers: list[Any] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda left, **_: timers.append(round(left)))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    monkeypatch.setattr(reward_pool, "SEARCH_S", 0.0)
    monkeypatch.setattr(reward_pool, "LOCKED_S", 0.0)

    def nested(*, completions, **_):
        reward_pool.run_together([Reward("short", pays, timeout_s=1000.0)], ["p"], ["c"], {})
        return [1.0] * len(completions)

    def pays(*, completions, **_):
        return [1.0] * len(completions)

    reward_pool.run_together([Reward("long", nested, timeout_s=5000.0)], ["p"], ["c"], {})
    *watched, last = timers
    assert last is None
    assert None not in watched
    assert min(watched) <= 1000
    assert watched[-1] > 2000
