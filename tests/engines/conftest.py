"""Real engines and one tiny random model for all tests of a module: a real start takes half a minute or more."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import environment_python, tiny_llama


@pytest.fixture(scope="session")
def python_of():
    """The Python of a backend's environment; skips where it is not installed."""

    return lambda backend: environment_python(f"server-{backend}")


@pytest.fixture(scope="session")
def server_python(python_of) -> Path:
    """A Python that has torch and transformers."""
    return python_of("vllm")


@pytest.fixture(scope="session")
def tiny(server_python, tmp_path_factory) -> Path:
    """A random two-layer Llama with its tokenizer."""
    return tiny_llama(server_python, tmp_path_factory.mktemp("models") / "tiny")


class Reference:
    """Hugging Face's logprobs of the same model, from a process of the server's environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def logprobs(self, questions: list[dict]) -> list[list[float]]:
        """One list a question, for all ids but the first: {"ids", "temperature", "adapter" (a PEFT folder or "")}, and
        "model" for another one.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(questions) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@pytest.fixture(scope="session")
def reference(server_python, tiny) -> Iterator[Reference]:
    command = [str(server_python), str(Path(__file__).with_name("reference.py")), str(tiny)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield Reference(process)
