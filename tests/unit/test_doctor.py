"""The doctor: findings, advice, exit status. The environments are real, their packages are stand-ins."""

import dataclasses
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import doctor
import wheelhouse
from environments import atomic, catalogue, compiling, installation, lockfile, machine
from environments.errors import SetupError
from environments.findings import Finding, exit_status
from environments.preflight import Gpu

ROOT = Path(__file__).parents[2]
HASH = f"--hash=sha256:{'0' * 64}"
TORCHAO_SKIPPED = """
import logging
logging.getLogger(__name__).warning(
    "Skipping import of cpp extensions due to incompatible torch version. Please upgrade to torch >= 2.11.0"
)
"""
TORCHAO_NO_KERNELS = """
import logging
logging.getLogger(__name__).warning("Failed to load _C_cutlass_90a.abi3.so: Could not load this library")
"""


class Installed:
    """Three environments that look like those of set-up."""

    def __init__(self, folder):
        self.venvs = folder / "venvs"
        self.lock_path = folder / "envs.lock"
        self.lines = [f"torch==2.13.0+cpu {HASH}", f"torchao==0.18.0 {HASH}"]
        self.write_lock()
        for plan in self.plans():
            self.build(plan)

    def write_lock(self):
        self.lock_path.write_text(wheelhouse.lock_text(*((name, "cpu", self.lines) for name in catalogue.DEFAULT)))

    def plans(self):
        python = Path(sys.base_prefix, "bin", f"python{wheelhouse.PYTHON}")
        return doctor._plans(lockfile.read(self.lock_path), "cpu", self.venvs, python, gpu=False)

    def plan(self, name):
        return next(plan for plan in self.plans() if plan.environment.name == name)

    def build(self, plan):
        venv.create(plan.build, symlinks=True)
        for line in plan.section.packages:
            name, version = line.split()[0].split("==")
            self.package(plan, name, version)
        (plan.build / "engine_options.json").write_text("{}")
        atomic.write_marker(plan.build, {"digest": plan.digest, "section": plan.section.key})
        atomic.point(plan.link, plan.build)

    def package(self, plan, name, version="1.0", code=""):
        (site,) = plan.build.glob("lib/python3*/site-packages")
        for old in site.glob(f"{name}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (site / f"{name}.py").write_text(code)

    def check(self, name):
        return {finding.name: finding for finding in installation.environment(self.plan(name))}


@pytest.fixture
def installed(tmp_path):
    return Installed(tmp_path)


def test_a_sound_installation_is_ok(installed):
    findings = installation.check(installed.plans(), "cpu")
    assert [finding.name for finding in findings if finding.status != "ok"] == []
    assert {"trainer", "trainer torch", "trainer torchao", "server-vllm", "server-sglang"} <= {f.name for f in findings}


def test_a_torch_and_torchao_that_do_not_go_together_are_a_failure(installed):
    installed.package(installed.plan("trainer"), "torchao", "0.18.0", TORCHAO_SKIPPED)
    finding = installed.check("trainer")["trainer torchao"]
    assert finding.status == "failure"
    assert "torch 2.13.0+cpu and torchao 0.18.0 do not go together" in finding.detail
    assert "setup_envs.sh --only trainer" in finding.remedy


def test_a_skipped_extension_is_a_failure_on_a_gpu_and_expected_on_a_cpu(installed):
    installed.package(installed.plan("trainer"), "torchao", "0.18.0", TORCHAO_NO_KERNELS)
    assert installed.check("trainer")["trainer torchao"].status == "ok"
    on_gpu = dataclasses.replace(installed.plan("trainer"), accelerator="cuda")
    finding = installation.judge(on_gpu, "torchao", "skipped", "Failed to load _C.so")
    assert finding.status == "failure"
    assert "compiled part did not load" in finding.detail


@pytest.mark.parametrize("code", ["raise OSError('libnuma.so.1: cannot open')", "import os; os._exit(9)"])
def test_a_module_that_cannot_be_imported_is_a_failure(installed, code):
    installed.package(installed.plan("trainer"), "torch", "2.13.0+cpu", code)
    finding = installed.check("trainer")["trainer torch"]
    assert finding.status == "failure"


def test_a_package_of_another_version_is_named(installed):
    installed.package(installed.plan("trainer"), "torchao", "0.17.0")
    finding = installed.check("trainer")["trainer"]
    assert (finding.status, finding.detail) == ("failure", "differs from envs.lock: torchao 0.17.0 instead of 0.18.0")


def test_a_missing_package_is_named(installed):
    installed.lines.append(f"peft==0.21.2 {HASH}")
    installed.write_lock()
    assert "peft is missing instead of 0.21.2" in installed.check("trainer")["trainer"].detail


def test_an_environment_of_an_older_lock_is_a_warning(installed):
    installed.lines.reverse()
    installed.write_lock()
    finding = installed.check("trainer")["trainer"]
    assert (finding.status, finding.remedy) == ("warning", "run scripts/setup_envs.sh --only trainer")


def test_an_environment_made_by_hand_is_a_warning(installed):
    (installed.plan("trainer").build / atomic.MARKER).unlink()
    finding = installed.check("trainer")["trainer"]
    assert (finding.status, finding.detail) == ("warning", "was not made by setup_envs.sh")


def test_a_missing_option_list_is_a_warning(installed):
    (installed.plan("server-vllm").build / "engine_options.json").unlink()
    assert installed.check("server-vllm")["server-vllm options"].status == "warning"


def on_cuda(installed, name="server-vllm"):
    return dataclasses.replace(installed.plan(name), accelerator="cuda")


def test_an_engine_on_a_gpu_needs_ninja_in_its_environment(installed):
    ninja = installed.plan("server-vllm").build / "bin" / "ninja"

    def found():
        return {finding.name: finding for finding in installation.environment(on_cuda(installed))}["server-vllm ninja"]

    assert found().status == "warning"
    assert "setup_envs.sh --only server-vllm" in found().remedy
    ninja.touch()
    assert found().status == "ok"
    assert not list(compiling.check(installed.plan("server-vllm"), {}))
    assert not list(compiling.check(on_cuda(installed, "trainer"), {}))


@pytest.mark.parametrize(
    ("nvcc", "runtime", "status"),
    [
        ("13.5.37", "13.0.96", "warning"),
        ("13.0.88", "13.0.96", "ok"),
        ("13.0.88", "13.2.75", "warning"),
        (None, "13.0.96", "ok"),
    ],
)
def test_a_compiler_and_headers_of_two_cuda_releases_are_a_warning(installed, tmp_path, nvcc, runtime, status):
    plan = on_cuda(installed)
    versions = {"nvidia-cuda-runtime": runtime, **({"nvidia-cuda-nvcc": nvcc} if nvcc else {})}
    own = plan.link / "lib/python3.11/site-packages/nvidia/cu13"
    (own / "bin").mkdir(parents=True)
    (own / "bin" / "nvcc").touch(mode=0o755)
    for variables in ({"PATH": ""}, {"CUDA_HOME": str(own)}):
        finding = list(compiling.check(plan, versions, variables, tmp_path / "no-toolkit"))[1]
        assert (finding.name, finding.status) == ("server-vllm nvcc", status)
        if status == "warning":
            assert f"nvidia-cuda-nvcc {nvcc}" in finding.detail
            assert f"set CUDA_HOME to it, such as /usr/local/cuda-{runtime[:4]}" in finding.remedy


def test_another_toolkit_makes_the_compiler_of_the_environment_of_no_account(installed, tmp_path):
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    home = nvcc.parents[1]
    versions = {"nvidia-cuda-nvcc": "13.5.37", "nvidia-cuda-runtime": "13.0.96"}
    for variables, default in (
        ({"PATH": "", "CUDA_HOME": str(home)}, tmp_path / "none"),
        ({"PATH": str(nvcc.parent)}, tmp_path / "none"),
        ({"PATH": ""}, home),
    ):
        finding = list(compiling.check(on_cuda(installed), versions, variables, default))[1]
        assert (finding.status, finding.detail) == ("ok", f"kernels are compiled with {home}, if any are")
    nvcc.unlink()
    finding = list(compiling.check(on_cuda(installed), versions, {"PATH": "", "CUDA_HOME": str(home)}))[1]
    assert (finding.status, finding.detail) == ("warning", f"{home} has no bin/nvcc")


@pytest.mark.parametrize(
    ("compiler", "status", "detail"),
    [
        ({"nvidia-cuda-nvcc": "13.0.88"}, "ok", "the environment's own is of CUDA 13.0, its headers 13.0"),
        ({}, "warning", "neither a CUDA toolkit nor nvidia-cuda-nvcc is there"),
    ],
)
def test_sglang_compiles_with_its_environments_own_where_no_place_has_a_compiler(
    installed, tmp_path, compiler, status, detail
):
    versions = {"nvidia-cuda-runtime": "13.0.96", **compiler}
    runtime_only = tmp_path / "cuda"
    runtime_only.mkdir()
    for variables in ({"PATH": ""}, {"PATH": "", "CUDA_HOME": str(runtime_only)}):
        plan = on_cuda(installed, "server-sglang")
        finding = list(compiling.check(plan, versions, variables, runtime_only))[1]
        assert finding.status == status
        assert detail in finding.detail


@pytest.mark.parametrize(
    ("gone", "status"), [(["trainer"], 2), (["server-vllm"], 1), (["server-vllm", "server-sglang"], 2)]
)
def test_the_trainer_and_one_server_are_needed(installed, gone, status):
    for name in gone:
        (installed.venvs / name).unlink()
    assert exit_status(installation.check(installed.plans(), "cpu")) == status


def test_exit_status_is_the_worst():
    ok, warning, failure = (Finding("a", status, "b") for status in ("ok", "warning", "failure"))
    assert [exit_status(found) for found in ([], [ok], [warning, ok], [ok, failure, warning])] == [0, 0, 1, 2]


def test_a_gpu_in_use_names_who_holds_it(tmp_path, monkeypatch, installed):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '4711, python3, 60000 MiB'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    sections = [plan.section for plan in installed.plans()]
    gpus = [Gpu("0", "NVIDIA H200", "580.95", 143771, 61000), Gpu("1", "NVIDIA H200", "580.95", 143771, 5)]
    found = {finding.name: finding for finding in machine.check(sections, gpus, Path(sys.executable), installed.venvs)}
    assert found["gpu 0"].status == "warning"
    assert "61000 of 143771 MiB in use by process 4711 python3 60000 MiB" in found["gpu 0"].detail
    assert found["gpu 1"].status == "ok"


def test_a_broken_driver_is_a_failure(installed):
    error = SetupError("the NVIDIA driver does not answer", why="version mismatch", remedy="reboot")
    sections = [plan.section for plan in installed.plans()]
    found = {finding.name: finding for finding in machine.check(sections, error, Path(sys.executable), installed.venvs)}
    assert found["driver"] == Finding(
        "driver", "failure", "the NVIDIA driver does not answer: version mismatch", "reboot"
    )


def test_a_pythonpath_is_a_warning_that_names_it():
    (finding,) = machine.python_path({"PYTHONPATH": "/opt/other/site-packages"})
    assert finding.status == "warning"
    assert "/opt/other/site-packages" in finding.detail
    assert "unset PYTHONPATH" in finding.remedy
    assert not [*machine.python_path({"PYTHONPATH": ""}), *machine.python_path({})]


def test_a_build_is_judged_by_its_own_section_and_one_for_the_other_accelerator_is_a_warning(installed):
    cpu = wheelhouse.lock_text(*((name, "cpu", installed.lines) for name in catalogue.DEFAULT))
    cuda = wheelhouse.lock_text(*((name, "cuda", [f"torch==2.13.0 {HASH}"]) for name in catalogue.DEFAULT))
    installed.lock_path.write_text(cpu + cuda.removeprefix("version = 1\n"))
    findings = doctor.examine("cuda", installed.venvs, installed.lock_path)
    found = {finding.name: finding for finding in findings}
    for name in catalogue.DEFAULT:
        assert found[name].status == "ok"
        warning = found[f"{name} accelerator"]
        assert (warning.status, warning.detail) == ("warning", "was built for cpu, and a run here is for cuda")
        assert warning.remedy == f"run scripts/setup_envs.sh --only {name} --accelerator cuda"
    findings = doctor.examine("cpu", installed.venvs, installed.lock_path)
    assert not [finding for finding in findings if finding.name.endswith("accelerator")]


def test_a_machine_that_is_told_to_use_its_cpu_may_have_a_broken_driver(installed, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = {finding.name: finding for finding in doctor.examine("cpu", installed.venvs, installed.lock_path)}
    assert found["driver"] == Finding("driver", "ok", "not asked: the CPU is to be used")


def test_little_shared_memory_is_a_warning(tmp_path, monkeypatch):
    real = machine.shutil.disk_usage
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: type(real(path))(64 << 20, 0, 64 << 20))
    finding = machine.shared_memory(tmp_path)
    assert finding.status == "warning"
    assert "--shm-size" in finding.remedy
    assert machine.shared_memory(tmp_path / "none").status == "warning"


def test_a_missing_libnuma_says_which_package_has_it(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(machine.ctypes, "CDLL", missing)
    finding = machine.numa()
    assert finding.status == "failure"
    assert "libnuma1" in finding.remedy


def run_doctor(installed, *arguments, **variables):
    python = f"{sys.base_prefix}/bin/python{wheelhouse.PYTHON}"
    command = [python, str(ROOT / "scripts/doctor.py"), "--accelerator", "cpu", "--venvs", str(installed.venvs)]
    return subprocess.run(
        [*command, "--lock", str(installed.lock_path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, **variables},
    )


def test_the_report_is_for_people_or_for_programs(installed):
    installed.package(installed.plan("trainer"), "torchao", "0.17.0")
    told = run_doctor(installed)
    assert told.returncode == 2, told.stderr
    assert any(line.startswith("FAIL  trainer ") for line in told.stdout.splitlines())
    assert "do: run scripts/setup_envs.sh --only trainer" in told.stdout
    report = json.loads(run_doctor(installed, "--json").stdout)
    assert report["status"] == 2
    (failed,) = [check for check in report["checks"] if check["status"] == "failure"]
    assert failed["name"] == "trainer"
    assert failed["remedy"]


def test_a_rehearsal_leaves_the_report_for_programs_one_json_object(installed):
    told = run_doctor(installed, "--json", "--smoke")
    assert json.loads(told.stdout)["status"] == told.returncode == 2
    assert "1. both halves import what they need: FAILED" in told.stderr


def test_the_pythonpath_of_a_run_is_reported(installed, tmp_path):
    report = json.loads(run_doctor(installed, "--json", PYTHONPATH=str(tmp_path)).stdout)
    assert "PYTHONPATH" in [check["name"] for check in report["checks"] if check["status"] == "warning"]


def test_a_lock_that_cannot_be_read_is_a_failure(installed):
    installed.lock_path.unlink()
    told = run_doctor(installed)
    assert told.returncode == 2
    assert "lock_envs.py write" in told.stdout
