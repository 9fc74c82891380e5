"""setup_envs.sh: whole or not at all, interrupted, doubled, repeated, altered.

Real uv and real environments, with tiny wheels instead of the real packages.
"""

import ast
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import wheelhouse
from environments import atomic, catalogue

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "scripts/setup_envs.sh"
DEADLINE_S = 200

# Notes each call of uv, and stops at the one named in $STOP_AT until $GO exists.
FAKE_UV = """#!/bin/sh
case "$*" in
    venv*) step=venv ;;
    "pip sync"*) step=sync ;;
    *) step=editable ;;
esac
echo "$step" >> "$NOTES"
if [ "$step" = "${STOP_AT:-}" ]; then
    while [ ! -e "$GO" ]; do sleep 0.05; done
fi
exec "$REAL_UV" "$@"
"""


def real_uv():
    found = catalogue.VENVS / ".uv/bin/uv"
    return str(found) if found.exists() else shutil.which("uv")


class Lab:
    """A folder with wheels, a lock of them, and the environment variables that lead set-up there."""

    def __init__(self, folder, cache):
        self.folder = folder
        self.name = "dev"
        self.venvs = folder / "venvs"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.lock = folder / "envs.lock"
        self.notes = folder / "notes"
        self.go = folder / "go"
        uv = folder / "uv"
        uv.write_text(FAKE_UV)
        uv.chmod(0o755)
        self.variables = {
            "GO": str(self.go),
            "NOTES": str(self.notes),
            "PATH": "/usr/bin:/bin",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_INDEX": "1",
            "REAL_UV": real_uv(),
            "TANDEM_PYTHON": sys.executable,
            "TANDEM_UV": str(uv),
            "UV_CACHE_DIR": str(cache),
            "HOME": str(folder),
        }
        self.backend = wheelhouse.repack(self.wheels, "flit_core").replace("flit_core==", "flit-core==")
        self.tiny = wheelhouse.make_wheel(self.wheels, "tiny")
        self.started = []
        self.write_lock()

    def close(self):
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            with process:
                pass

    @property
    def link(self):
        return self.venvs / self.name

    def write_lock(self, *lines):
        packages = [self.backend, *(lines or [self.tiny])]
        accelerators = ["any"] if self.name == "dev" else ["cpu", "cuda"]
        self.lock.write_text(wheelhouse.lock_text(*((self.name, kind, packages) for kind in accelerators)))

    def start(self, *arguments, check=False, **variables):
        # A test runner in the background ignores SIGINT, and its children would as well.
        command = ["env", "--default-signal=INT", "sh", str(SETUP), "--only", self.name]
        command += [] if check else ["--skip-check"]
        process = subprocess.Popen(
            [*command, "--lock", str(self.lock), "--venvs", str(self.venvs), *arguments],
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments, check=False, **variables):
        process = self.start(*arguments, check=check, **variables)
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self):
        return self.notes.read_text().split() if self.notes.exists() else []

    def wait_for_call(self, step):
        deadline = time.monotonic() + DEADLINE_S
        while step not in self.calls():
            assert time.monotonic() < deadline, f"uv was never asked for {step}"
            time.sleep(0.02)

    def builds(self):
        return sorted(path.name for path in self.venvs.glob(f"{self.name}-*"))

    def marker(self):
        return json.loads((self.link / atomic.MARKER).read_text())

    def linked(self):
        return self.link.resolve().name


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("uv-cache")


@pytest.fixture
def lab(tmp_path, cache):
    made = Lab(tmp_path, cache)
    yield made
    made.close()


@pytest.fixture
def halves(lab):
    """The lab with an environment that is locked for either accelerator."""
    lab.name = "trainer"
    lab.write_lock()
    return lab


def set_up(lab, *arguments, **options):
    done = lab.run(*arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def assert_works(lab, version="1.0"):
    code = "import tiny, bridge, server_env, trainer_env; print(tiny.version)"
    answer = subprocess.run(
        [lab.link / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert answer.stdout.strip() == version
    assert (lab.link / "bin/tandem-server").exists()
    assert (atomic.read_marker(lab.link) or {}).get("environment") == "dev"


def assert_group_ends(group):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail("a child was left")


def test_an_environment_is_built_at_its_final_place(lab):
    done = lab.run()
    assert done.returncode == 0, done.stderr
    assert "dev: ready, installed in" in done.stdout
    assert lab.calls() == ["venv", "sync", "editable"]
    assert lab.link.is_symlink()
    assert lab.builds() == [lab.link.readlink().name]
    assert_works(lab)


def test_wheels_may_lie_in_several_folders(lab):
    more = lab.folder / "more"
    more.mkdir()
    lab.write_lock(lab.tiny, wheelhouse.make_wheel(more, "other"))
    set_up(lab, PIP_FIND_LINKS=f"{lab.wheels} {more}")
    assert_works(lab)


@pytest.mark.parametrize("script", ["scripts/setup_envs.sh", "scripts/doctor.py"])
def test_a_variable_names_the_place_of_the_environments(tmp_path, script):
    shell = ["sh"] if script.endswith(".sh") else [sys.executable]
    variables = {"PATH": "/usr/bin:/bin", "TANDEM_PYTHON": sys.executable, "TANDEM_VENVS": str(tmp_path / "elsewhere")}
    told = subprocess.run(
        [*shell, ROOT / script, "--help"], env=variables, capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    assert f"({tmp_path}/elsewhere)" in "".join(told.stdout.split())


def test_a_repeat_calls_nothing(lab):
    assert lab.run().returncode == 0
    again = lab.run(TANDEM_UV="/nonexistent")
    assert again.returncode == 0, again.stderr
    assert "dev: up to date" in again.stdout


@pytest.mark.parametrize("step", ["venv", "sync", "editable"])
def test_a_run_killed_half_way_is_made_good_by_the_next(lab, step):
    first = lab.start(STOP_AT=step)
    lab.wait_for_call(step)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE_S)
    assert not lab.link.exists()
    second = lab.run()
    assert second.returncode == 0, second.stderr
    assert_works(lab)


def test_a_new_run_waits_for_the_child_that_a_killed_run_left(lab):
    first = lab.start(STOP_AT="sync")
    lab.wait_for_call("sync")
    first.kill()
    second = lab.start()
    second.stdout.readline()
    assert "waiting for process" in second.stdout.readline()
    lab.go.touch()
    _, err = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 0, err
    first.communicate(timeout=DEADLINE_S)
    assert_works(lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_children_and_says_how_to_go_on(lab, number):
    process = lab.start(STOP_AT="sync")
    lab.wait_for_call("sync")
    process.send_signal(number)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert err.strip() == "error: interrupted: a signal asked for it. Do: run the command again to go on"
    assert_group_ends(process.pid)
    assert lab.run().returncode == 0
    assert_works(lab)


def test_two_runs_at_once_build_once(lab):
    both = [lab.start(), lab.start()]
    for process in both:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    assert lab.calls().count("sync") == 1
    assert_works(lab)


def test_an_altered_hash_is_refused_by_name_and_the_old_environment_stays(lab):
    assert lab.run().returncode == 0
    other = wheelhouse.make_wheel(lab.wheels, "other")
    lab.write_lock(lab.tiny, f"{other[:-1]}{'0' if other[-1] != '0' else '1'}")
    refused = lab.run()
    assert refused.returncode == 1
    errors = refused.stderr.strip().splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: hash mismatch for other==1.0: ")
    assert " Do: " in errors[0]
    assert str(lab.venvs / "logs/dev.log") in errors[0]
    assert_works(lab)


def test_a_package_that_the_index_lacks_is_an_error_with_its_log(lab):
    lab.write_lock(lab.tiny.replace("1.0", "7.0"))
    refused = lab.run()
    assert refused.returncode == 1
    assert "dev cannot be installed" in refused.stderr
    assert "tiny==7.0" in (lab.venvs / "logs/dev.log").read_text()
    assert not lab.link.exists()


def test_a_changed_lock_switches_to_a_new_build_and_removes_the_old(lab):
    assert lab.run().returncode == 0
    old = lab.builds()
    lab.write_lock(wheelhouse.make_wheel(lab.wheels, "tiny", "2.0"))
    assert lab.run().returncode == 0
    assert len(lab.builds()) == 1
    assert lab.builds() != old
    assert_works(lab, "2.0")


@pytest.mark.parametrize("through", ["the folder", "a link to it"])
def test_a_build_that_a_process_runs_from_is_kept(lab, through):
    if through == "a link to it":
        (lab.folder / "real").mkdir()
        lab.venvs.symlink_to("real")
    assert lab.run().returncode == 0
    old = lab.link.resolve()
    with (old / "requirements.txt").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        lab.write_lock(wheelhouse.make_wheel(lab.wheels, "tiny", "2.0"))
        assert lab.run().returncode == 0
        assert (old / "bin/python").exists()
    lab.write_lock(wheelhouse.make_wheel(lab.wheels, "tiny", "3.0"))
    assert lab.run().returncode == 0
    assert not old.exists()


def test_to_the_other_accelerator_and_back_is_a_flip_of_the_link(halves):
    set_up(halves, "--accelerator", "cuda")
    cuda = halves.linked()
    set_up(halves, "--accelerator", "cpu")
    cpu = halves.linked()
    assert halves.builds() == sorted([cpu, cuda])
    calls = halves.calls()
    for accelerator, build in (("cuda", cuda), ("cpu", cpu)):
        done = set_up(halves, "--accelerator", accelerator)
        assert f"trainer: ready, built before (trainer.{accelerator}." in done.stdout
        assert halves.linked() == build
    assert halves.calls() == calls


def test_a_build_that_was_checked_is_not_checked_again_for_a_flip(halves):
    set_up(halves, "--accelerator", "cuda")
    set_up(halves, "--accelerator", "cpu")
    marker = halves.marker() | {"check": {"state": "", "imports": "passed", "options": "none"}}
    atomic.write_marker(halves.link.resolve(), marker)
    set_up(halves, "--accelerator", "cuda")
    set_up(halves, "--accelerator", "cpu", check=True)  # Its imports would fail: unsloth is not in the lab.
    assert halves.marker() == marker


def test_a_changed_lock_removes_only_builds_for_the_same_accelerator(halves):
    set_up(halves, "--accelerator", "cuda")
    cuda = halves.linked()
    set_up(halves, "--accelerator", "cpu")
    halves.write_lock(wheelhouse.make_wheel(halves.wheels, "tiny", "2.0"))
    set_up(halves, "--accelerator", "cpu")
    assert halves.builds() == sorted([cuda, halves.linked()])
    set_up(halves, "--accelerator", "cuda")
    assert len(halves.builds()) == 2
    assert cuda not in halves.builds()


def test_an_incomplete_build_is_removed_whatever_it_was_for(halves):
    set_up(halves, "--accelerator", "cuda")
    (halves.link / atomic.MARKER).unlink()
    set_up(halves, "--accelerator", "cpu")
    assert halves.builds() == [halves.linked()]


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_any_leaves_what_is_there_as_it_is_whatever_it_was_built_for(halves, accelerator):
    set_up(halves, "--accelerator", accelerator)
    build, calls = halves.linked(), halves.calls()
    # No GPU, no nvidia-smi: left to itself it would take the CPU. And nothing is left to check.
    done = set_up(halves, "--accelerator", "any", check=True, TANDEM_UV="/nonexistent")
    assert f"trainer: up to date (trainer.{accelerator}." in done.stdout
    assert (halves.linked(), halves.builds(), halves.calls()) == (build, [build], calls)


def test_any_builds_what_this_machine_needs_where_nothing_is_there(halves):
    set_up(halves, "--accelerator", "any")
    assert halves.marker()["accelerator"] == "cpu"


def test_any_takes_what_is_there_of_an_older_lock_too(halves):
    set_up(halves, "--accelerator", "cuda")
    build, calls = halves.linked(), halves.calls()
    halves.write_lock(wheelhouse.make_wheel(halves.wheels, "tiny", "2.0"))
    done = set_up(halves, "--accelerator", "any", check=True, TANDEM_UV="/nonexistent")
    assert "trainer: as it is installed, of an older lock" in done.stdout
    assert (halves.linked(), halves.builds(), halves.calls()) == (build, [build], calls)
    (halves.link / atomic.MARKER).unlink()
    set_up(halves, "--accelerator", "any")
    assert halves.marker()["accelerator"] == "cpu"


def test_any_switches_to_a_current_build_rather_than_make_one(halves):
    set_up(halves, "--accelerator", "cuda")
    cuda, calls = halves.linked(), halves.calls()
    halves.link.unlink()
    set_up(halves, "--accelerator", "any")
    assert halves.linked() == cuda
    assert halves.calls() == calls


def test_a_damaged_build_is_built_again(lab):
    assert lab.run().returncode == 0
    (lab.link / atomic.MARKER).unlink()
    assert lab.run().returncode == 0
    assert lab.calls().count("sync") == 2
    assert_works(lab)


def test_a_folder_in_the_way_is_not_touched(lab):
    lab.link.mkdir(parents=True)
    (lab.link / "mine").touch()
    refused = lab.run()
    assert refused.returncode == 1
    assert "is in the way" in refused.stderr
    assert (lab.link / "mine").exists()


def test_a_place_that_cannot_be_written_to_is_refused_in_one_line(lab):
    lab.venvs.touch()
    refused = lab.run()
    assert refused.returncode == 1
    assert refused.stderr.strip() == (
        f"error: cannot write to {lab.venvs}/.locks: Not a directory. "
        "Do: make it writable, or choose another place with TANDEM_VENVS"
    )


def test_an_import_that_fails_is_an_error_with_its_log(lab):
    process = lab.run()
    assert process.returncode == 0
    command = ["sh", str(SETUP), "--only", "dev", "--lock", str(lab.lock), "--venvs", str(lab.venvs)]
    checked = subprocess.run(
        command, env=lab.variables, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert checked.returncode == 1
    assert "its imports fail: ModuleNotFoundError: No module named 'pytest'" in checked.stderr
    assert lab.calls().count("sync") == 1


def test_uv_is_installed_by_pip_from_the_lock(lab):
    """With no uv on the machine, the one in the lock is taken, by its hash."""
    fake = wheelhouse.make_wheel(
        lab.wheels, "uv", files={"uv-1.0.data/scripts/uv": f'#!/bin/sh\nexec "{lab.variables["REAL_UV"]}" "$@"\n'}
    )
    dev = ("dev", "any", [lab.backend, lab.tiny])
    lab.lock.write_text(wheelhouse.lock_text(("uv", "any", [fake]), dev))
    lab.variables |= {"TANDEM_UV": "", "TANDEM_PYTHON": f"{sys.base_prefix}/bin/python{wheelhouse.PYTHON}"}
    done = lab.run()
    assert done.returncode == 0, done.stderr
    assert (lab.venvs / ".uv").is_symlink()
    assert_works(lab)
    shutil.rmtree(lab.venvs)
    lab.lock.write_text(wheelhouse.lock_text(("uv", "any", [f"{fake[:-4]}0000"]), dev))
    refused = lab.run()
    assert refused.returncode == 1
    assert "pip could not install uv" in refused.stderr


def test_a_python_that_is_too_old_is_refused_in_one_line(tmp_path):
    for name in ("sh", "dirname"):
        (tmp_path / name).symlink_to(shutil.which(name))
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.2" && exit 0\nexit 1\n')
    old.chmod(0o755)
    refused = subprocess.run(
        ["sh", str(SETUP)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert refused.returncode == 1
    assert refused.stderr.strip() == (
        "error: no Python 3.11 or newer: Python 3.9.2 is what this machine has. "
        "Do: install python3.11 or python3.12, or name one with TANDEM_PYTHON=/path/to/python"
    )


@pytest.mark.parametrize("script", ["doctor.py", "lock_envs.py", "train.py"])
def test_a_script_says_so_when_its_python_is_too_old(script):
    for path in (ROOT / "scripts" / script, ROOT / "scripts/environments/__init__.py"):
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 7))
    old = "import runpy, sys; sys.version_info, sys.version = (3, 10, 13), '3.10.13'; del sys.argv[0]; "
    command = [sys.executable, "-c", f"{old}runpy.run_path(sys.argv[0], run_name='__main__')", f"scripts/{script}"]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "scripts"}
    told = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )
    assert told.returncode == 1
    assert told.stderr.strip() == f"{script} needs Python 3.11 or newer, and this is 3.10.13: run it with python3.11."


def test_a_marker_says_what_was_built(lab):
    assert lab.run().returncode == 0
    marker = lab.marker()
    assert marker["section"] == f"dev.any.py{wheelhouse.PYTHON.replace('.', '')}"
    assert marker["check"] is None
    assert lab.link.resolve().name == f"dev-{marker['digest']}"
