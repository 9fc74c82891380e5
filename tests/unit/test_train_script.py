"""scripts/train.py: the standard library alone, the right environments, then tandem-train in its place."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"


@pytest.fixture
def checkout(tmp_path):
    """A copy of the script where setting up only notes its arguments, and tandem-train prints its own."""
    for name in ("scripts/train.py", "trainer_env/src/trainer_env/arguments.py", "configs/demo.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "scripts/setup_envs.sh").write_text('echo "setup: $*"; exit "${SETUP_CODE:-0}"\n')
    program = tmp_path / ".venvs/trainer/bin/tandem-train"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "train: $*"; echo "pid: $$"\n')
    program.chmod(0o755)
    return tmp_path


def run(folder, *argv, cwd=None, **variables):
    return subprocess.run(
        [sys.executable, "-I", "-S", str(folder / "scripts/train.py"), *argv],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd or folder,
        env={"PATH": "/usr/bin:/bin", **variables},
        check=False,
    )


def setup_line(done):
    return next(line for line in done.stdout.splitlines() if line.startswith("setup: "))


def test_help_needs_no_environment(capsys):
    began = time.perf_counter()
    done = run(ROOT, "--help")
    with capsys.disabled():
        print(f"\ntrain.py --help: {time.perf_counter() - began:.2f} s")
    assert done.returncode == 0
    assert "--backend" in done.stdout


@pytest.mark.parametrize(
    "path", [SCRIPT, ROOT / "trainer_env/src/trainer_env/arguments.py"], ids=lambda path: path.name
)
def test_it_imports_only_the_standard_library(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module
            names.add(node.module.partition(".")[0])
    assert names <= sys.stdlib_module_names


def test_it_prepares_then_becomes_tandem_train(checkout):
    done = run(checkout, "--steps", "3", "--set", "grpo.beta=0.1")
    assert done.returncode == 0
    assert setup_line(done) == f"setup: --only trainer server-vllm --venvs {checkout}/.venvs"
    assert "train: --steps 3 --set grpo.beta=0.1" in done.stdout


def test_tandem_train_keeps_the_process_id(checkout):
    child = subprocess.Popen(
        [sys.executable, str(checkout / "scripts/train.py")], stdout=subprocess.PIPE, text=True, cwd=checkout, env={}
    )
    output, _ = child.communicate(timeout=60)
    assert f"pid: {child.pid}" in output


@pytest.mark.parametrize(
    ("argv", "variables", "expected"),
    [
        (["--backend", "sglang"], {}, "--only trainer server-sglang"),
        (["--set", "server.backend=sglang"], {}, "--only trainer server-sglang"),
        (["--set", 'server.backend="sglang"', "--backend", "vllm"], {}, "--only trainer server-vllm"),
        (["--accelerator", "cuda"], {}, "--accelerator cuda"),
        (["--placement", "cpu"], {}, "--accelerator cpu"),
        ([], {"CUDA_VISIBLE_DEVICES": ""}, "--accelerator cpu"),
        ([], {"CUDA_VISIBLE_DEVICES": "-1"}, "--accelerator cpu"),
        (["--accelerator", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "--accelerator cuda"),
    ],
)
def test_only_the_environments_that_the_run_needs_are_prepared(checkout, argv, variables, expected):
    assert expected in setup_line(run(checkout, *argv, **variables))


@pytest.mark.parametrize("command", ["report", "export", "config", "evaluate"])
def test_what_trains_nothing_takes_whatever_trainer_environment_is_there(checkout, command):
    done = run(checkout, command, "one", CUDA_VISIBLE_DEVICES="")
    assert setup_line(done) == f"setup: --only trainer --venvs {checkout}/.venvs --accelerator any"
    assert f"train: {command} one" in done.stdout


def test_a_gpu_is_left_for_setup_to_find(checkout):
    assert "--accelerator" not in setup_line(run(checkout, CUDA_VISIBLE_DEVICES="0"))


def test_the_config_names_the_engine(checkout):
    config = checkout / "mine.toml"
    config.write_text('[server]\nbackend = "sglang"\n[placement]\naccelerator = "cpu"\n')
    line = setup_line(run(checkout, "--config", "mine.toml"))
    assert "server-sglang" in line
    assert line.endswith("--accelerator cpu")


def test_a_resumed_run_brings_its_own_engine(checkout):
    config = checkout / "runs/one/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[server]\nbackend = "sglang"\n')
    assert "server-sglang" in setup_line(run(checkout, "--resume"))


def test_another_place_for_the_environments(checkout, tmp_path):
    (checkout / ".venvs").rename(tmp_path / "elsewhere")
    done = run(checkout, TANDEM_VENVS=str(tmp_path / "elsewhere"))
    assert setup_line(done).endswith(f"--venvs {tmp_path}/elsewhere")
    assert "train: " in done.stdout


def test_from_another_folder_the_demo_of_the_checkout_runs(checkout, tmp_path):
    (tmp_path / "away").mkdir()
    done = run(checkout, cwd=tmp_path / "away")
    assert done.returncode == 0
    assert "train: " in done.stdout


def test_a_failed_setup_ends_it(checkout):
    done = run(checkout, SETUP_CODE="7")
    assert done.returncode == 7
    assert "train: " not in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_setup_is_passed_on_and_its_end_waited_for(checkout, number):
    (checkout / "scripts/setup_envs.sh").write_text(
        """trap 'sleep 0.2; echo ended; exit 130' INT TERM; echo begun; while :; do sleep 0.05; done"""
    )
    child = subprocess.Popen(
        # A test runner in the background ignores SIGINT, and its children would as well.
        ["env", "--default-signal=INT", sys.executable, str(checkout / "scripts/train.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert child.stdout
    with child.stdout as output:
        assert output.readline() == "begun\n"
        child.send_signal(number)
        try:
            assert child.wait(60) == 130
            with pytest.raises(ProcessLookupError):  # Nobody is left: the end of the set-up was waited for.
                os.killpg(child.pid, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        assert output.read() == "ended\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "mine.toml: there is no such file"),
        ("[grpo", "mine.toml: not a TOML file"),
        ("[server]\nbackend = 'vlm'", "server.backend: expected one of vllm, sglang, got 'vlm'"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_before_anything_is_installed(checkout, text, expected):
    if text is not None:
        (checkout / "mine.toml").write_text(text)
    done = run(checkout, "--config", "mine.toml")
    assert done.returncode != 0
    assert expected in done.stderr
    assert "setup: " not in done.stdout
