"""However a process ends, its owner or its guard, nobody of its family lives on, and nobody else is touched."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge import guard
from bridge import process as process_module
from bridge.errors import EngineFailed
from bridge.process import GuardedProcess, end_group, family_of, log_tail, stop_child, wait_until_gone

FAMILY = """
import os, signal, sys, time

out, *flags = sys.argv[1:]

def note(name):
    with open(f"{out}/{name}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{out}/{name}.part", f"{out}/{name}")

def child(name, session, orphan):
    if os.fork():
        return
    if session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    note(name)
    while True:
        signal.pause()

if "deaf" in flags:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "polite" in flags:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
for name, session, orphan in [("group", 0, 0), ("session", 1, 0), ("daemon", 1, 1), ("orphan", 0, 1)]:
    if name in flags:
        child(name, session, orphan)
if "exits" in flags:
    while not all(os.path.exists(f"{out}/{name}") for name in flags if name != "deaf" and name != "exits"):
        pass
    os._exit(3)
note("command")
while True:
    time.sleep(0.01)  # A signal that comes just before pause() would be seen after it only.
"""

KINDS = ["group", "session", "daemon", "orphan"]


async def until(condition: Callable[[], object], what: str, timeout_s: float = 90.0) -> None:
    """Wait for what has no event of its own, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


class Family:
    """Commands that note their pids in a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.started: list[GuardedProcess] = []

    def argv(self, *flags: str) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", FAMILY, str(self.folder), *flags]

    async def start(self, *flags: str) -> GuardedProcess:
        process = await self.run(*self.argv(*flags))
        names = [name for name in KINDS if name in flags] + ["command"] * ("exits" not in flags)
        await until(lambda: all((self.folder / name).exists() for name in names), f"{names} started")
        return process

    async def run(self, *argv: str, env: dict[str, str] | None = None) -> GuardedProcess:
        process = await GuardedProcess.start(argv, env=env or {}, log_path=self.log)
        self.started.append(process)
        return process

    async def python(self, code: str) -> GuardedProcess:
        return await self.run(sys.executable, "-I", "-S", "-c", code)

    @property
    def pids(self) -> list[int]:
        """Everybody who noted a pid."""
        return [int((self.folder / name).read_text()) for name in [*KINDS, "command"] if (self.folder / name).exists()]

    @property
    def alive(self) -> list[int]:
        return [pid for pid in self.pids if guard.living(pid)]

    async def gone(self) -> None:
        assert self.pids
        await until(lambda: not self.alive, "the whole family is gone")


@pytest.fixture
def newcomers():
    """Descendants of ours since the test began."""
    before = set(guard.descendants(os.getpid()))
    return lambda: set(guard.descendants(os.getpid())) - before


@pytest.fixture
async def family(tmp_path):
    family = Family(tmp_path)
    yield family
    for process in family.started:
        await process.stop(0)
    assert not family.alive


async def test_a_command_that_ends_well_returns_0(family):
    process = await family.python("")
    assert await process.wait() == 0
    assert process.returncode == 0


async def test_the_exit_code_is_the_commands_own(family):
    assert await (await family.python("raise SystemExit(7)")).wait() == 7


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
async def test_a_command_that_a_signal_ended_returns_its_negative(family, signum):
    process = await family.python(f"import os; os.kill(os.getpid(), {int(signum)})")
    assert await process.wait() == -signum


async def test_a_command_that_does_not_exist_returns_127_and_the_log_says_why(family):
    process = await family.run("/nowhere/engine")
    assert await process.wait() == 127
    assert await process.stop() == "gone"
    assert "/nowhere/engine did not start" in log_tail(family.log)


async def test_a_file_that_is_no_program_returns_127(family, tmp_path):
    (tmp_path / "program").write_text("")
    assert await (await family.run(str(tmp_path / "program"))).wait() == 127


async def test_a_missing_working_directory_is_an_engine_failure(tmp_path):
    with pytest.raises(EngineFailed, match="nowhere"):
        await GuardedProcess.start(["true"], env={}, log_path=tmp_path / "log", cwd=tmp_path / "nowhere")


async def test_output_is_appended_to_the_log(family):
    family.log.write_text("before\n")
    await (await family.python("import sys; print('out'); print('err', file=sys.stderr)")).wait()
    assert sorted(family.log.read_text().split()) == ["before", "err", "out"]


async def test_the_environment_is_the_one_given_and_no_more(family):
    process = await family.run("/usr/bin/env", env={"ONLY": "this"})
    await process.wait()
    assert "ONLY=this" in family.log.read_text()
    assert "HOME=" not in family.log.read_text()


async def test_the_command_has_no_input_and_no_descriptor_of_ours(family):
    process = await family.start()
    links = {fd.name: str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert links.pop("0") == "/dev/null"
    assert links == {"1": str(family.log), "2": str(family.log)}


async def test_the_command_can_be_interrupted(family):
    process = await family.start()
    os.kill(process.pid, signal.SIGINT)
    assert await process.wait() == -signal.SIGINT


async def test_sigterm_is_asked_first(family):
    process = await family.start("polite")
    assert await process.stop() == "terminated"
    assert process.returncode == 5


async def test_a_command_deaf_to_sigterm_is_killed(family):
    process = await family.start("deaf")
    assert await process.stop(0.05) == "killed"
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("deaf", [False, True])
async def test_every_kind_of_grandchild_ends_with_it(family, deaf):
    process = await family.start(*KINDS, *["deaf"] * deaf)
    assert len(family.alive) == 5
    assert await process.stop(0.05 if deaf else 10) == ("killed" if deaf else "terminated")
    assert not family.alive


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_command_leaves_behind_is_ended_too(family, kind):
    process = await family.start(kind, "exits")
    assert await process.wait() == 3
    assert await process.stop() == "terminated"
    assert not family.alive


async def test_deaf_leftovers_are_killed_as_fast_as_stop_asks(family, monkeypatch, tmp_path):
    patient = tmp_path / "guard.py"
    patient.write_text(Path(guard.__file__).read_text().replace("DEFAULT_TERM_S = 5.0", "DEFAULT_TERM_S = 600.0"))
    monkeypatch.setattr(guard, "__file__", str(patient))
    process = await family.start("daemon", "exits", "deaf")
    assert await process.wait() == 3
    assert await process.stop(0) == "killed"
    assert not family.alive


async def test_without_stop_the_family_is_ended_after_the_command(family):
    process = await family.start("daemon", "exits")
    await process.wait()
    await family.gone()


async def test_an_impatient_second_stop_shortens_the_first(family):
    process = await family.start("deaf")
    patient = asyncio.create_task(process.stop(60))
    await asyncio.sleep(0)
    assert await process.stop(0) == "killed"
    assert await patient == "killed"


async def test_a_second_stop_says_the_same(family):
    process = await family.start()
    assert await process.stop() == "terminated"
    assert await process.stop() == "terminated"


async def test_many_stops_at_once_say_the_same(family):
    process = await family.start()
    assert set(await asyncio.gather(*(process.stop() for _ in range(5)))) == {"terminated"}


async def test_a_stop_after_the_end_is_gone(family):
    process = await family.python("")
    await process.wait()
    assert await process.stop() == "gone"
    assert process.returncode == 0


async def test_a_cancelled_stop_still_ends_the_family(family):
    process = await family.start("deaf")
    stop = asyncio.create_task(process.stop(0))
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    await family.gone()


async def test_every_waiter_hears_of_the_end(family):
    process = await family.start()
    waiters = [asyncio.create_task(process.wait()) for _ in range(3)]
    waiters[0].cancel()
    await process.stop()
    assert await asyncio.gather(*waiters[1:]) == [-signal.SIGTERM] * 2


async def test_a_start_that_is_cancelled_leaves_nobody(family, newcomers):
    for steps in range(4):
        start = asyncio.create_task(GuardedProcess.start(family.argv(), env={}, log_path=family.log))
        for _ in range(steps):
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert not newcomers()


async def test_a_start_that_is_cancelled_just_as_it_succeeds_is_cancelled(family, newcomers, monkeypatch):
    take_in = GuardedProcess._take_in

    def take_in_and_cancel(self: GuardedProcess, words: list[str]) -> None:
        take_in(self, words)
        if words[0] == "STARTED":
            start.cancel()

    monkeypatch.setattr(GuardedProcess, "_take_in", take_in_and_cancel)
    start = asyncio.create_task(GuardedProcess.start(family.argv(), env={}, log_path=family.log))
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not newcomers()


async def test_a_guard_that_does_not_answer_is_an_engine_failure(family, newcomers, monkeypatch):
    monkeypatch.setattr(process_module, "START_S", 0.0)
    with pytest.raises(EngineFailed, match="did not answer"):
        await family.run("/bin/sleep", "60")
    assert not newcomers()


async def test_killing_the_guard_ends_the_command_and_its_group(family):
    process = await family.start("group", "deaf")
    process._guard.kill()
    assert await process.wait() == -signal.SIGKILL
    await family.gone()
    assert await process.stop() == "killed"


async def test_a_guard_killed_with_a_stop_unread_hangs_nobody(family):
    process = await family.start("deaf")
    process._guard.send_signal(signal.SIGSTOP)
    stop = asyncio.create_task(process.stop(60))
    await asyncio.sleep(0)
    process._guard.kill()
    assert await stop == "killed"
    assert not family.alive


async def test_a_guard_that_hangs_is_done_without(family, monkeypatch):
    monkeypatch.setattr(process_module, "SLACK_S", 0.05)
    engine = await family.start(*KINDS, "deaf")
    engine._guard.send_signal(signal.SIGSTOP)
    assert await engine.stop(0.05, 0.05) == "killed"
    assert not family.alive


async def test_a_guard_told_to_end_ends_the_family(family):
    process = await family.start("daemon")
    process._guard.terminate()
    assert await process.wait() == -signal.SIGTERM
    await family.gone()


OWNER = """
import asyncio, os, sys
from pathlib import Path
from bridge.process import GuardedProcess, _start_guard

async def main(how, log, *argv):
    if how == "deaf":  # It never reads a word of its guard.
        line = _start_guard(argv, {}, Path(log), None)
        print("up", flush=True)
        os.read(0, 1)
    process = await GuardedProcess.start(argv, env={}, log_path=Path(log))
    print("up", flush=True)
    await asyncio.to_thread(os.read, 0, 1)
    if how == "raises":
        raise SystemExit(1)

asyncio.run(main(*sys.argv[1:]))
"""


@contextlib.asynccontextmanager
async def owned(family: Family, how: str, *flags: str):
    """A family whose owner is a process of its own."""
    owner = subprocess.Popen(  # noqa: ASYNC220 (milliseconds)
        [sys.executable, "-c", OWNER, how, str(family.log), *family.argv(*flags)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout
        assert await asyncio.to_thread(owner.stdout.readline) == b"up\n"
        names = [*(name for name in KINDS if name in flags), "command"]
        await until(lambda: all((family.folder / name).exists() for name in names), f"{names} started")
        yield owner
        owner.kill()


@pytest.mark.parametrize("how", ["listens", "deaf"])
async def test_kill_9_of_the_owner_ends_the_whole_family(family, how):
    async with owned(family, how, *KINDS) as owner:
        assert len(family.alive) == 5
        owner.kill()
        await family.gone()


@pytest.mark.parametrize("how", ["returns", "raises"])
async def test_an_owner_that_ends_without_a_stop_ends_the_whole_family(family, how):
    async with owned(family, how, *KINDS) as owner:
        assert owner.stdin
        owner.stdin.close()
        await family.gone()


@pytest.fixture
def many_open_files():
    """More open descriptors than select can watch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows no more than 2048 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_an_owner_with_thousands_of_open_files_starts_and_ends_a_family(family, many_open_files):
    assert await (await family.python("raise SystemExit(7)")).wait() == 7
    process = await family.start("deaf", "session")
    assert await process.stop(0.2) == "killed"
    assert process.returncode == -signal.SIGKILL


async def test_an_innocent_process_with_the_same_command_line_survives(family, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    process = await family.start(*KINDS)
    with spawned(*family.argv()) as innocent:
        await process.stop(0)
        assert innocent.poll() is None
        innocent.kill()


def test_a_pid_that_is_no_descendant_gets_no_signal():
    with spawned("/bin/sleep", "60") as innocent, spawned("/bin/sleep", "60") as root:
        guard.send([innocent.pid], signal.SIGKILL, root.pid)
        assert innocent.poll() is None
        guard.send([innocent.pid], signal.SIGKILL, os.getpid())
        assert innocent.wait(90) == -signal.SIGKILL
        root.kill()


async def test_starting_and_stopping_leaks_no_descriptor_and_no_process(family):
    await (await family.python("")).stop()
    before, others = open_descriptors(), children()
    for _ in range(3):
        process = await family.python("")
        await process.wait()
        await process.stop()
    with contextlib.suppress(EngineFailed):
        await GuardedProcess.start(["true"], env={}, log_path=family.log, cwd=Path("/nowhere"))
    assert open_descriptors() == before
    assert children() <= others


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[str]:
    """Pids of our children, zombies too."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def spawned(*argv: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(argv, start_new_session=True, stdout=subprocess.PIPE)


def python(code: str) -> "subprocess.Popen[bytes]":
    """A child that has said something."""
    started = spawned(sys.executable, "-I", "-S", "-c", code)
    assert started.stdout
    assert started.stdout.readline()
    started.stdout.close()
    return started


def test_stop_child_terminates():
    started = spawned("/bin/sleep", "60")
    assert stop_child(started) == "terminated"
    assert started.returncode == -signal.SIGTERM
    started.communicate()


def test_stop_child_kills_the_deaf_and_its_group():
    started = python(
        "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: print(1, flush=True)\n"  # Its parent would meet a closed pipe.
        "while True: signal.pause()"
    )
    assert stop_child(started, 0.05) == "killed"
    assert started.returncode == -signal.SIGKILL
    assert not end_group(started.pid, 0)


def test_stop_child_ends_what_a_dead_child_left_in_its_group():
    started = python(
        "import os, signal\nif os.fork() == 0:\n    print(1, flush=True)\n    while True: signal.pause()\nos._exit(4)"
    )
    os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
    assert stop_child(started) == "gone"
    assert started.returncode == 4
    assert started.pid not in {one.group for one in guard.processes().values()}


def test_stop_child_of_a_child_that_is_collected_just_then_is_content(monkeypatch):
    started = spawned("/bin/sleep", "60")
    kill = os.kill

    def too_late(pid, _signum):
        kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", too_late)
    assert stop_child(started) == "terminated"
    started.communicate()


def test_stop_child_of_a_collected_child_signals_nobody(monkeypatch):
    started = spawned("/bin/true")
    started.communicate()
    monkeypatch.setattr(os, "killpg", None)
    monkeypatch.setattr(os, "kill", None)
    assert stop_child(started) == "gone"


def test_wait_until_gone_names_who_still_lives():
    with spawned("/bin/sleep", "60") as alive, spawned("/bin/sleep", "60") as dead:
        family = family_of(os.getpid())
        assert family.keys() >= {alive.pid, dead.pid}
        family = {pid: family[pid] for pid in (alive.pid, dead.pid)}
        dead.kill()
        assert wait_until_gone({dead.pid: family[dead.pid]}, 90) == []  # A zombie is gone.
        assert wait_until_gone(family, 0.3) == [alive.pid]
        assert wait_until_gone({alive.pid: family[alive.pid] - 1}, 0.3) == []  # Its pid was somebody else's then.
        alive.kill()


def test_the_log_tail_is_the_last_lines(tmp_path):
    path = tmp_path / "log"
    path.write_text("\n".join(map(str, range(100))))
    assert log_tail(path, 3) == "97\n98\n99"


def test_the_log_tail_of_a_huge_log_reads_only_its_end(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast \xff line\n")
    assert log_tail(path, 1) == "last � line"


def test_the_log_tail_of_what_cannot_be_read_is_empty(tmp_path):
    assert log_tail(tmp_path / "nowhere") == ""
    assert log_tail(tmp_path) == ""
