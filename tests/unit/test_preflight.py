"""What set-up refuses before it installs anything, how it reads pip's settings, and how it explains uv's failures."""

import pwd
import sys
from pathlib import Path

import pytest

import wheelhouse
from environments import install, lockfile, machine, preflight, smoke, uv
from environments.catalogue import ENVIRONMENTS, SGLANG_CPU_PATH
from environments.errors import SetupError
from environments.failures import explain
from environments.lockfile import Section

RUNTIME = f"nvidia-cuda-runtime==13.0.96 --hash=sha256:{'0' * 64}"


def section(*lines, accelerator="cuda", download_bytes=1000, platform="x86_64-manylinux_2_34"):
    return Section(
        "server-vllm", accelerator, wheelhouse.PYTHON, "a.in", None, "x", platform, download_bytes, tuple(lines)
    )


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a script in nvidia-smi's place."""

    def install_script(body):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install_script


def test_a_machine_without_nvidia_smi_uses_its_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.gpus() == []


def test_gpus_are_read_from_nvidia_smi(nvidia_smi):
    nvidia_smi("echo '0, NVIDIA H200, 580.95.05, 143771, 12'; echo '1, NVIDIA H200, 580.95.05, [N/A], 0'")
    first, second = preflight.gpus()
    assert (first.index, first.name, first.driver) == ("0", "NVIDIA H200", "580.95.05")
    assert (first.memory_total, first.memory_used, second.memory_total) == (143771, 12, 0)


def test_a_driver_without_devices_means_the_cpu(nvidia_smi):
    nvidia_smi("echo 'No devices were found'; exit 6")
    assert preflight.gpus() == []


def test_a_broken_driver_is_refused_rather_than_ignored(nvidia_smi):
    nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    with pytest.raises(SetupError, match=r"version mismatch.*--accelerator cpu"):
        preflight.gpus()


@pytest.mark.parametrize(("driver", "refused"), [("570.124.06", True), ("580.65.06", False), ("600.10", False)])
def test_a_driver_too_old_for_the_cuda_build_is_refused(driver, refused):
    if not refused:
        preflight.check_driver(section(RUNTIME), driver)
        return
    with pytest.raises(SetupError, match=r"driver 570.124.06 is too old: .*CUDA 13.*driver 580 or newer"):
        preflight.check_driver(section(RUNTIME), driver)


def test_a_cpu_build_asks_for_no_driver():
    preflight.check_driver(section(accelerator="cpu"), "470.1")


@pytest.mark.parametrize(
    ("system", "libc", "what"),
    [
        ("Darwin arm64", ("", ""), "Darwin arm64 is not supported"),
        ("Linux aarch64", ("glibc", "2.36"), "Linux aarch64 is not supported"),
        ("Linux x86_64", ("glibc", "2.31"), r"glibc 2\.31 is too old"),
        ("Linux x86_64", ("", ""), "not glibc"),
    ],
)
def test_a_platform_without_wheels_is_refused(system, libc, what):
    with pytest.raises(SetupError, match=what):
        preflight.check_platform(section(), system=system, libc=libc)


def test_a_new_enough_glibc_is_accepted():
    preflight.check_platform(section(), system="Linux x86_64", libc=("glibc", "2.34"))
    preflight.check_platform(section(), system="Linux x86_64", libc=("glibc", "2.100"))


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(tmp_path):
    with pytest.raises(SetupError, match=r"250000000\.0 GB are needed and [\d.]+ GB are free"):
        preflight.check_disk([section(download_bytes=10**17)], tmp_path / "not/yet/there")
    preflight.check_disk([section()], tmp_path)


def test_the_disk_of_the_cache_counts_too(tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.mkdir()
    real = preflight.shutil.disk_usage

    def usage(path):
        return real(path) if path != full else type(real(path))(10, 10, 0)

    monkeypatch.setattr(preflight.shutil, "disk_usage", usage)
    with pytest.raises(SetupError, match=r"disk of .*full/uv is too small"):
        preflight.check_disk([section()], tmp_path, {"UV_CACHE_DIR": str(full / "uv")})


def test_a_user_without_a_home_is_no_error(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    preflight.check_disk([section()], tmp_path, {})
    with pytest.raises(SetupError, match=r"no Python 3\.99"):
        preflight.find_python(lock_for(tmp_path, "3.99"), "trainer", "cpu")


def lock_for(tmp_path, python):
    path = tmp_path / "envs.lock"
    text = wheelhouse.lock_text(("trainer", "cpu", []))
    path.write_text(text.replace(f"py{wheelhouse.PYTHON.replace('.', '')}", f"py{python.replace('.', '')}"))
    return lockfile.read(path)


def test_the_running_python_is_preferred(tmp_path, monkeypatch):
    monkeypatch.delenv("TANDEM_PYTHON", raising=False)
    found, version = preflight.find_python(lock_for(tmp_path, wheelhouse.PYTHON), "trainer", "cpu")
    assert (found, version) == (Path(sys.base_prefix, "bin", f"python{wheelhouse.PYTHON}"), wheelhouse.PYTHON)


def test_a_python_that_the_environment_names_comes_before_it(tmp_path, monkeypatch):
    named = tmp_path / "named"
    named.symlink_to(sys.executable)
    lock = lock_for(tmp_path, wheelhouse.PYTHON)
    for value in (str(named), "named"):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("TANDEM_PYTHON", value)
        assert preflight.find_python(lock, "trainer", "cpu") == (named, wheelhouse.PYTHON)
    monkeypatch.setenv("TANDEM_PYTHON", str(tmp_path / "gone"))
    assert preflight.find_python(lock, "trainer", "cpu")[0] != named


def test_a_python_that_is_not_locked_is_refused(tmp_path):
    lock = lock_for(tmp_path, "3.99")
    with pytest.raises(
        SetupError,
        match=r"no Python 3\.99: trainer is locked for it.*install python3\.99 \(or name one with TANDEM_PYTHON=",
    ):
        preflight.find_python(lock, "trainer", "cpu")
    with pytest.raises(SetupError, match=r"no Python 3\.99 at "):
        preflight.find_python(lock, "trainer", "cpu", Path(sys.executable))
    with pytest.raises(SetupError, match="trainer is not locked for cuda"):
        preflight.find_python(lock, "trainer", "cuda")


def test_pips_settings_are_spelled_for_uv():
    spelled = uv.settings(
        {
            "PIP_INDEX_URL": "https://mirror.example/simple",
            "PIP_EXTRA_INDEX_URL": "https://a.example https://b.example",
            "PIP_FIND_LINKS": "/wheels /more",
            "PIP_TRUSTED_HOST": "mirror.example",
            "PIP_DEFAULT_TIMEOUT": "99",
            "PIP_CERT": "/ca.pem",
        }
    )
    assert spelled["UV_DEFAULT_INDEX"] == "https://mirror.example/simple"
    assert spelled["UV_INDEX"] == "https://a.example https://b.example"
    assert spelled["UV_FIND_LINKS"] == "/wheels,/more"
    assert spelled["UV_INSECURE_HOST"] == "mirror.example"
    assert spelled["UV_HTTP_TIMEOUT"] == "99"
    assert spelled["SSL_CERT_FILE"] == "/ca.pem"


def test_uvs_own_settings_win():
    spelled = uv.settings({"PIP_FIND_LINKS": "/pip", "UV_FIND_LINKS": "/uv", "UV_INDEX_STRATEGY": "first-index"})
    assert "UV_FIND_LINKS" not in spelled
    assert spelled["UV_INDEX_STRATEGY"] == "first-index"


def test_cpu_torch_comes_from_find_links_where_they_hold_it(tmp_path):
    links = {"PIP_FIND_LINKS": f"/nowhere {tmp_path}"}
    assert "--find-links" in uv.source_arguments("2.13.0+cpu", links)
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    assert uv.source_arguments("2.13.0+cpu", links) == []
    assert "--find-links" in uv.source_arguments("2.14.0+cpu", links)


def test_another_page_or_none_can_take_the_place_of_pytorchs_own():
    other = {"TANDEM_TORCH_LINKS": "https://mirror.example/torch/"}
    assert uv.source_arguments("2.13.0+cpu", other) == ["--find-links", "https://mirror.example/torch/"]
    assert uv.source_arguments("2.13.0+cpu", {"TANDEM_TORCH_LINKS": ""}) == []
    assert uv.source_arguments("2.11.0", other) == []


@pytest.mark.parametrize("version", [None, "2.11.0"])
def test_only_a_cpu_torch_is_looked_for_elsewhere(version):
    assert uv.source_arguments(version, {}) == []


def test_an_air_gapped_machine_asks_no_index():
    assert uv.source_arguments("2.13.0+cpu", {"PIP_NO_INDEX": "1"}) == ["--no-index"]
    assert uv.source_arguments("2.11.0", {"PIP_NO_INDEX": "false"}) == []


@pytest.mark.parametrize(("version", "taken"), [("22.2.2", False), (None, False), ("22.3", True), ("26.0.1", True)])
def test_a_pip_that_cannot_install_into_another_environment_is_not_taken_for_uv(tmp_path, monkeypatch, version, taken):
    calls = []

    def found(name):
        if version is None:
            raise uv.importlib.metadata.PackageNotFoundError(name)
        return version

    def run(command, **_):
        calls.append([str(word) for word in command])
        return 0

    monkeypatch.setattr(uv.importlib.metadata, "version", found)
    monkeypatch.setattr(uv.venv, "create", lambda folder, **options: (folder.mkdir(), calls.append(options)))
    monkeypatch.setattr(uv, "run", run)
    uv._build(tmp_path / "uv", "uv==1.0", tmp_path, 0)
    made, command = calls
    assert made == {"with_pip": not taken}
    assert ("--python" in command) is taken
    assert command[0] == (sys.executable if taken else str(tmp_path / "uv/bin/python"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("  cause: Hash mismatch for `torch==2.11.0`", "hash mismatch for torch==2.11.0"),
        ("error: failed to write: No space left on device (os error 28)", "the disk is full"),
        ("vllm==0.26.0 has no wheels with a matching platform tag", "use Linux x86-64"),
        ("  cause: error sending request for url (…)", "PIP_INDEX_URL"),
        ("error: something else", "something else. Log: "),
    ],
)
def test_a_failure_of_uv_is_explained(tmp_path, said, expected):
    log = tmp_path / "trainer.log"
    log.write_text(f"$ uv pip sync old\nerror: No space left on device\n\n$ uv pip sync\n{said}\n")
    text = str(explain("trainer", log))
    assert expected in text
    assert "\n" not in text
    assert " Do: " in text
    assert str(log) in text


def test_a_check_that_was_left_out_is_due_once_its_stand_ins_are_there(tmp_path):
    environment = ENVIRONMENTS["server-sglang"]
    before = smoke.state(environment, "cpu", tmp_path, gpu=False)
    stand_in = tmp_path / SGLANG_CPU_PATH / "sgl_kernel.py"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text("")
    assert smoke.state(environment, "cpu", tmp_path, gpu=False) != before
    assert smoke.state(environment, "cuda", tmp_path, gpu=True) != smoke.state(environment, "cuda", tmp_path, gpu=False)


def test_a_cuda_environment_is_not_checked_without_a_gpu(tmp_path):
    environment = ENVIRONMENTS["server-vllm"]
    outcome = smoke.check(environment, "cuda", tmp_path, tmp_path, tmp_path / "log", gpu=False, keep_open=0)
    assert outcome.imports.startswith("skipped: no GPU here")


def test_the_digest_covers_section_accelerator_recipe_and_place(tmp_path, monkeypatch):
    def digest(lines=(), accelerator="cpu", venvs=tmp_path):
        environment = ENVIRONMENTS["server-vllm"]
        root = Path(__file__).parents[2]
        return install.Plan(
            environment, section(*lines), accelerator, Path(sys.executable), root, venvs, gpu=False
        ).digest

    digests = [digest(), digest([RUNTIME]), digest(accelerator="cuda"), digest(venvs=tmp_path / "other")]
    monkeypatch.setattr(install, "RECIPE", "another")
    assert len({*digests, digest()}) == 5


def test_a_missing_compiler_stops_cuda_and_warns_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert {finding.status for finding in machine.compiler(tmp_path, cuda=True)} == {"failure"}
    assert {finding.status for finding in machine.compiler(tmp_path, cuda=False)} == {"warning"}
    (tmp_path / "gcc").write_text("#!/bin/sh\n")
    (tmp_path / "gcc").chmod(0o755)
    (tmp_path / "Python.h").touch()
    assert {finding.status for finding in machine.compiler(tmp_path, cuda=True)} == {"ok"}
