"""The option list of an engine is taken from its own start, whatever module builds the parser."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/environments/engine_options.py"

ENGINE = """
import argparse, sys
other = argparse.ArgumentParser()
other.add_argument("--unrelated", action="store_true")
other.parse_known_args([])
print("starting noisily")
class Parser(argparse.ArgumentParser):
    def parse_args(self, args=None, namespace=None):
        return super().parse_args(args, namespace)
parser = Parser()
parser.add_argument("--model-path", "--model", required=True)
parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
parser.add_argument("--enable-lora", action="store_true")
parser.add_argument("--off", dest="on", action="store_false")
parser.add_argument("--rank", type=int, choices=[8, 16])
parser.add_argument("--names", nargs="+")
parser.add_argument("--maybe", nargs="?")
try:
    parser.parse_args(sys.argv[1:])
except Exception:
    pass
raise SystemExit("the engine went on")
"""


@pytest.fixture
def listed(tmp_path):
    def run(engine, text=ENGINE):
        module = {"sglang": "sglang/launch_server.py", "vllm": "vllm/entrypoints/openai/api_server.py"}[engine]
        (tmp_path / module).parent.mkdir(parents=True)
        (tmp_path / module).write_text(text)
        (tmp_path / engine / "__init__.py").write_text("__version__ = '9.9'\n")
        out = tmp_path / "out.json"
        done = subprocess.run(
            [sys.executable, str(SCRIPT), engine, str(out)],
            env={"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done, json.loads(out.read_text()) if out.exists() else None

    return run


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_kind_of_option_is_described(listed, engine):
    done, report = listed(engine)
    assert done.returncode == 0, done.stderr
    assert (report["engine"], report["version"]) == (engine, "9.9")
    options = {option["dest"]: option for option in report["options"]}
    assert list(options) == ["model_path", "enable_prefix_caching", "enable_lora", "on", "rank", "names", "maybe"]
    assert options["model_path"]["flags"] == ["--model-path", "--model"]
    assert options["enable_prefix_caching"] == {
        "flags": ["--enable-prefix-caching", "--no-enable-prefix-caching"],
        "dest": "enable_prefix_caching",
        "takes_value": False,
        "many": False,
        "choices": None,
        "negatable": True,
        "const": None,
    }
    assert (options["enable_lora"]["takes_value"], options["enable_lora"]["const"]) == (False, True)
    assert (options["on"]["flags"], options["on"]["const"]) == (["--off"], False)
    assert (options["rank"]["takes_value"], options["rank"]["choices"]) == (True, [8, 16])
    assert options["names"]["many"]
    assert options["maybe"]["takes_value"]


def test_an_engine_that_does_not_start_is_a_failure(listed):
    done, report = listed("sglang", "raise RuntimeError('no kernels')\n")
    assert done.returncode != 0
    assert "no kernels" in done.stderr
    assert report is None


def test_an_engine_that_parses_nothing_is_a_failure(listed):
    done, report = listed("vllm", "pass\n")
    assert "ended without parsing a command line" in done.stderr
    assert done.returncode != 0
    assert report is None
