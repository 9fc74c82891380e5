"""Who may import whom: read from the source of every file, and from what an import of the bridge really loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HALVES = {"server_env", "trainer_env"}
TRAINING = {"unsloth", "trl"}
ENGINES = {"vllm", "sglang", "sgl_kernel"}
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
UNSAFE_CALLS = {"recv_pyobj", "send_pyobj", "recv_serialized", "send_serialized", "eval", "exec"}
HEAVY = {"torch", "transformers", "peft", "unsloth", "trl", "vllm", "sglang", "numpy"}
STANDARD = set(sys.stdlib_module_names)
RUN_INSIDE = {"scripts/environments/probe_extensions.py"}
"""Scripts that an environment's own interpreter runs, to see what it holds."""
ENGINE_CHILD = "server_env/src/server_env/engines/sglang_cpu/"
"""Runs in the engine's processes only, and is no package: no module of ours can import it."""


def imports(source: str) -> set[str]:
    """Top-level names of everything that a file imports, at any depth, by name or by `import_module`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {name.name for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                found.add(module)
    return {name.partition(".")[0] for name in found}


def files(folder: str) -> Iterator[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} has no code"
    yield from found


def offences(folder: str, allowed=None, forbidden=()) -> dict[str, set[str]]:
    """Files of a folder with the imports that they should not have."""
    bad = {}
    for path in files(folder):
        names = imports(path.read_text())
        wrong = names & set(forbidden) if allowed is None else names - set(allowed)
        if wrong:
            bad[str(path.relative_to(ROOT))] = wrong
    return bad


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import torch.nn as nn",
        "from torch.nn import functional",
        "def late():\n    import torch",
        "if TYPE_CHECKING:\n    import torch",
        "import importlib\nimportlib.import_module('torch.nn')",
        "__import__('torch')",
    ],
)
def test_the_scan_sees_every_way_to_import(source):
    assert "torch" in imports(source)


def test_the_bridge_imports_the_standard_library_zmq_and_msgspec():
    assert not offences("bridge/src", allowed=STANDARD | {"zmq", "msgspec", "bridge"})


def test_the_guard_imports_the_standard_library_alone():
    assert imports((ROOT / "bridge/src/bridge/guard.py").read_text()) <= STANDARD


@pytest.mark.parametrize("half", sorted(HALVES))
def test_the_halves_never_import_each_other(half):
    assert not offences(f"{half}/src", forbidden=HALVES - {half})


def test_only_grpo_imports_unsloth_and_trl():
    bad = offences("trainer_env/src", forbidden=TRAINING)
    assert set(bad) <= {"trainer_env/src/trainer_env/training/grpo.py"}


@pytest.mark.parametrize("folder", ["bridge/src", "server_env/src", "scripts"])
def test_nothing_outside_the_trainer_imports_what_trains(folder):
    bad = offences(folder, forbidden={"torch", *TRAINING})
    assert not [path for path in bad if not path.startswith(ENGINE_CHILD)]


@pytest.mark.parametrize("folder", ["bridge/src", "server_env/src", "trainer_env/src", "scripts"])
def test_no_module_of_ours_imports_an_engine(folder):
    """They are asked over HTTP: what an engine moves inside cannot break us, and the trainer needs none of it."""
    bad = offences(folder, forbidden=ENGINES)
    assert not [path for path in bad if not path.startswith(ENGINE_CHILD) and path not in RUN_INSIDE]


@pytest.mark.parametrize("folder", ["bridge/src", "server_env/src", "trainer_env/src"])
def test_nothing_is_unpickled_or_run_as_code(folder):
    assert not offences(folder, forbidden=UNSAFE)
    called = {
        (path.name, name)
        for path in files(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        for name in [getattr(node.func, "attr", getattr(node.func, "id", ""))]
        if name in UNSAFE_CALLS
    }
    # torch's: a module is put into its other mode. What a model wrote, in a process of its own.
    assert called <= {("trl_shim.py", "eval"), ("run_tests.py", "exec")}


def test_scripts_import_the_standard_library_alone():
    assert set(offences("scripts", allowed=STANDARD | {"environments"})) <= RUN_INSIDE


def test_the_arguments_that_scripts_show_need_the_standard_library_alone():
    assert imports((ROOT / "trainer_env/src/trainer_env/arguments.py").read_text()) <= STANDARD


LOAD_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
before = set(sys.modules)
import bridge
for module in pkgutil.iter_modules(bridge.__path__, "bridge."):
    importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_the_bridge_loads_where_nothing_heavy_is_installed_and_loads_nothing_heavy():
    code = f"ABSENT = {HEAVY | HALVES!r}\n{LOAD_ALL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    loaded = {name for name in done.stdout.split() if "cython" not in name}
    assert {"bridge", "zmq", "msgspec"} <= loaded
    assert not loaded & (HEAVY | HALVES)
    assert loaded <= STANDARD | {"bridge", "zmq", "msgspec", "typing_extensions"}  # zmq takes the last where it is.


def test_the_guard_runs_without_any_site_package():
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "bridge/src/bridge/guard.py"], capture_output=True, timeout=60, check=False
    )
    assert b"not enough values to unpack" in done.stderr
