"""What Tandem writes on an engine's command line, read by the engine's own parser."""

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from served import tiny_model
from server_env.config import from_dict
from server_env.engines.backends import NOWHERE, make_engine
from server_env.engines.options import EngineOptions
from server_env.engines.sglang import CPU_STAND_INS, SGLangConfig
from server_env.engines.sglang import arguments as sglang_arguments
from server_env.engines.vllm import VLLMConfig
from server_env.engines.vllm import arguments as vllm_arguments
from server_env.supervision.environment import cleaned

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

CONFIGS = {"vllm": (VLLMConfig, vllm_arguments), "sglang": (SGLangConfig, sglang_arguments)}
NEGATIVE = {"no_enable_chunked_prefill", "no_enable_prefix_caching"}
GONE = {
    "vllm": {"swap_space"},
    "sglang": {"cuda_graph_max_bs", "cuda_graph_bs", "torchao_config", "enable_ep_moe", "enable_nan_detection"},
}
"""Options of the table that the locked version has no more, and that are refused by name."""


class Parser:
    """An engine's parser, in a process of its environment."""

    def __init__(self, backend: str, process: "subprocess.Popen[str]") -> None:
        self.backend = backend
        self._process = process
        self.options = msgspec.json.decode(self._line(), type=EngineOptions)

    def _line(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def read(self, words: list[str]) -> dict:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._line())


@pytest.fixture(scope="module", params=CONFIGS)
def parser(request, python_of, tmp_path_factory):
    variables = cleaned(os.environ, "cpu")
    if request.param == "sglang":
        variables |= {"PYTHONPATH": str(CPU_STAND_INS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("parse_switches.py")
    with (
        (tmp_path_factory.mktemp("parser") / "errors").open("w") as errors,
        subprocess.Popen(
            [python_of(request.param), script, request.param],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        yield Parser(request.param, process)
        assert process.stdin
        process.stdin.close()


def positive(name: str) -> str:
    return name.removeprefix("no_") if name in NEGATIVE else name


def required(backend: str) -> list[str]:
    return ["--model-path", "m"] if backend == "sglang" else ["--model", "m"]


def test_every_switch_of_the_config_is_read_by_the_engine_as_it_was_meant(parser):
    config, arguments = CONFIGS[parser.backend]
    switches = [f.name for f in msgspec.structs.fields(config) if bool in getattr(f.type, "__args__", ())]
    wrong = []
    for name in set(switches) - GONE[parser.backend]:
        for wanted in (True, False):
            line = arguments(msgspec.convert({name: wanted}, config), parser.options)
            read = parser.read([*required(parser.backend), *line])[positive(name)]
            if bool(read) is not (wanted is (name not in NEGATIVE)):
                wrong.append((name, wanted, line, read))
    assert not wrong


def test_the_command_line_of_a_plain_config_has_only_options_that_the_engine_knows(parser, tmp_path):
    section = {"model": str(tiny_model(tmp_path / "m")), "backend": parser.backend, "context_length": 100}
    for extra in ({}, {"prefix_cache": False, "chunked_prefill": False, "cuda_graphs": False, "max_sequences": 4}):
        for device in ("cpu", "cuda"):
            data = {"server": {**section, **extra, "device": device, "engine_command": ["x"]}}
            line = make_engine(from_dict(data, "test")).command(NOWHERE)[1:]
            parser.options.check(line, "test")


def test_options_of_the_table_that_this_version_lacks_are_the_ones_that_are_known_to_be_gone(parser):
    config, _ = CONFIGS[parser.backend]
    names = set(config.__struct_fields__) - {"extra_args"}
    gone = {name for name in names if not parser.options.find("--" + positive(name).replace("_", "-"))}
    assert gone == GONE[parser.backend]
