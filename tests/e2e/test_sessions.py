"""A Session from Python: in a notebook's kernel that is interrupted, killed and replaced, in a script that awaits."""

import json
import time
from pathlib import Path

import pytest

from bridge.guard import processes
from kernels import kernel, register
from runs import FAKE, JOB, TRAINER_PYTHON

OPEN = """
from trainer_env import Session
session = Session.open("job.toml", *{overrides!r}, run="run")
"""
SLOW = """
import time
from pathlib import Path

def reward(completions, **_):
    time.sleep(0.7)
    while Path("hold").exists():
        Path("held").touch()
        time.sleep(0.05)
    return [float(len(completion)) for completion in completions]
"""


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    return register(tmp_path_factory.mktemp("jupyter"))


@pytest.fixture
def folder(tmp_path, lab, monkeypatch) -> Path:
    """A working directory with job.toml, whose rewards take their time."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = JOB.format(model=lab.tiny(), engine=json.dumps(FAKE), output_dir="runs")
    text = text.replace('function = "regex"\nargs = { pattern = "7" }', 'function = "slow.py:reward"')
    (tmp_path / "job.toml").write_text(text)
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def server_pid(folder: Path) -> int:
    return json.loads((folder / "runs/run/server_process.json").read_text())["pid"]


def steps(folder: Path) -> list[int]:
    path = folder / "runs/run/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def until_step(folder: Path, step: int, timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while step not in steps(folder):
        assert time.monotonic() < deadline, f"no step {step}: {steps(folder)}"
        time.sleep(0.05)


def test_an_interrupted_cell_ends_the_step_and_keeps_the_server(registered, folder):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=["grpo.max_steps=40", "grpo.save_steps=1"]))
        answers = it.good("session.generate('What', n=3, max_tokens=2)").shown
        assert answers.count("version=0") == 3
        engine = it.good("session.status().engine_pid").shown
        interrupted = []

        def interrupt(cell) -> None:
            if not interrupted and 2 in steps(folder):
                interrupted.append(True)
                it.manager.interrupt_kernel()

        cell = it.run("print(session.train().steps)", seen=interrupt)
        assert not cell.error, cell.error
        assert int(cell.shown) == steps(folder)[-1] < 40
        assert "<svg" in cell.html
        assert it.good("session.status().engine_pid").shown == engine
        version = it.good("session.generate('What')[0].version").shown
        assert int(version) == steps(folder)[-1]
        more = int(version) + 2
        assert it.good(f"print(session.train({more}).steps)").shown == f"{more}\n"
        assert steps(folder) == list(range(1, more + 1))
        pid = server_pid(folder)
        it.good("session.close()")
        assert pid not in processes()


def test_a_training_that_was_broken_off_goes_on_from_its_checkpoint_in_the_same_session(registered, folder):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=["grpo.max_steps=60", "grpo.save_steps=3"]))
        interrupts = []

        def interrupt(cell) -> None:
            """Twice in one step, which waits."""
            if interrupts or 5 not in steps(folder):
                return
            (folder / "hold").touch()
            deadline = time.monotonic() + 240
            while not (folder / "held").exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            for _ in range(2):
                interrupts.append(it.manager.interrupt_kernel())
                time.sleep(3)  # Two signals at once would be one.

        assert "KeyboardInterrupt" in it.run("session.train()", seen=interrupt).error
        (folder / "hold").unlink()
        newest = int(it.good("session.generate('What', max_tokens=2)[0].version").shown)
        assert newest >= 5
        assert "is to have 2 in all" in it.run("session.train(2)").error
        more = newest + 2
        assert it.good(f"print(session.train({more}).steps)").shown == f"{more}\n"
        assert steps(folder) == list(range(1, more + 1))
        assert "There is no adapter version 99" in it.run("session.generate('What', version=99)").error
        it.good("session.close()")


def test_a_killed_kernel_is_followed_by_one_that_looks_and_goes_on(registered, folder, capsys):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=["grpo.max_steps=60", "grpo.save_steps=2"]))
        it.begin("session.train()")
        until_step(folder, 5)
        it.kill()
    pid = server_pid(folder)
    with kernel(registered, folder) as it:
        cell = it.good("""
import time
began = time.perf_counter()
from trainer_env import Session
session = Session.attach("run")
answer = session.generate("What", max_tokens=2)[0]
print(time.perf_counter() - began)
""")
        with capsys.disabled():
            print(f"\na new kernel has its first answer after {float(cell.shown.splitlines()[-1]):.2f} s")
        assert server_pid(folder) == pid
        version = int(it.good("answer.version").shown)
        assert version >= 5
        more = version + 2
        assert it.good("[step.step for step in session.history.steps][:5]").shown == "[1, 2, 3, 4, 5]"
        assert "<svg" in it.good("session.history").html
        assert it.good(f"print(session.train({more}).steps)").shown == f"{more}\n"
        assert steps(folder) == list(range(1, more + 1))
        assert server_pid(folder) == pid
        it.good("session.close()")
        assert pid not in processes()


def test_a_run_that_was_killed_before_its_first_checkpoint_can_be_asked_and_says_why_it_cannot_go_on(
    registered, folder
):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=["grpo.max_steps=60"]))
        it.begin("session.train()")
        until_step(folder, 1)
        it.kill()
    with kernel(registered, folder) as it:
        it.good("from trainer_env import Session; session = Session.attach('run')")
        version = it.good("session.generate('What', max_tokens=2)[0].version").shown.splitlines()[-1]
        assert int(version) >= 1
        cell = it.run("session.train()")
        assert "There is no whole checkpoint" in cell.error
        assert "grpo.save_steps" in cell.error
        assert steps(folder)[0] == 1
        it.good("session.close()")


def test_a_cell_that_opens_the_run_again_goes_on_with_its_server(registered, folder):
    opening = OPEN.format(overrides=["server.keep_server_s=60"])
    with kernel(registered, folder) as it:
        it.good(opening)
        it.good(opening)  # Before the server has answered.
        it.good("session.generate('What')")
        pid = server_pid(folder)
        it.good(opening)
        it.good("session.generate('What')")
        assert server_pid(folder) == pid
        it.good("session.close()")
        assert pid not in processes()


def test_a_run_that_has_ended_is_asked_under_what_it_saved_and_goes_on(registered, folder):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=["grpo.max_steps=4", "grpo.save_steps=2"]))
        it.good("session.train(); session.close()")
        it.good("session = Session.attach('run')")
        versions = "session.generate('What', version=2)[0].version, session.generate('What')[0].version"
        assert it.good(versions).shown.endswith("(2, 4)")
        scored = "session.evaluate(version={!r}, n=2, temperature=1.0, max_examples=1)"
        answered = it.good(f"[sample.version for sample in {scored.format('latest')}.samples]")
        assert answered.shown == "[4, 4]"
        assert it.good(f"[sample.version for sample in {scored.format('base')}.samples]").shown == "[0, 0]"
        assert "no longer served" in it.run("session.generate('What', version=1)").error
        assert it.good("print(session.train(6).steps)").shown == "6\n"
        assert steps(folder) == list(range(1, 7))
        assert it.good("session.generate('What')[0].version").shown == "6"
        assert "report.html" in it.good("session.report()").shown
        assert "--lora-modules" in it.good("print(session.export('out').commands['vllm'])").shown
        assert "out" in it.run("session.export('out')").error
        it.good("session.close()")


def test_a_name_that_is_no_run_gets_the_nearest_one(registered, folder):
    with kernel(registered, folder) as it:
        it.good(OPEN.format(overrides=[]) + "session.close()")
        error = it.run("Session.attach('rum')").error
        assert "There is no run 'rum'" in error
        assert "Did you mean run?" in error


AWAITING = """
import asyncio
from bridge.errors import ConfigError
from trainer_env import Session

async def main():
    async with Session.open("job.toml", "grpo.max_steps=30", "grpo.save_steps=1", run="run").aio as session:
        first = await asyncio.gather(*(session.generate(text, max_tokens=2) for text in "abc"))
        print({group[0].version for group in first} == {0})
        training = asyncio.create_task(session.train())
        while len(session.session.history.steps) < 2:
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(session.generate(text, max_tokens=2) for text in "abc"))
        print(min(group[0].version for group in answers) >= 1, (await session.status()).engine)
        try:
            await session.train()
        except ConfigError as error:
            print("being trained already" in str(error))
        training.cancel()
        try:
            await training
        except asyncio.CancelledError:
            print("cancelled")
        done = len(session.session.history.steps)
        print(2 <= done < 30, (await session.train(done + 1)).steps == done + 1)
    try:
        await session.generate("a")
    except ConfigError as error:
        print("This session is closed" in str(error))

asyncio.run(main())
"""


def test_a_script_that_awaits_asks_while_it_trains(lab, folder):
    run = lab.start(str(TRAINER_PYTHON), "-c", f"import os; os.chdir({str(folder)!r})\n{AWAITING}")
    assert run.finish().code == 0, run.report()
    assert [line for line in run.stdout.splitlines() if line[:4] in ("True", "canc", "Fals")] == [
        "True",
        "True vllm",
        "True",
        "cancelled",
        "True True",
        "True",
    ]
    run.gone()
