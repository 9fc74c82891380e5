"""One real engine and one tiny random model for all tests of a module: a real start takes half a minute or more."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import ROOT

VENV = ROOT / ".venvs" / "server-vllm"
PYTHON = VENV / "bin" / "python"


@pytest.fixture(scope="session")
def server_python() -> Path:
    """The Python of the vLLM environment."""
    if not PYTHON.exists():
        pytest.skip(f"{VENV} is not installed: bash scripts/setup_envs.sh --only server-vllm")
    return PYTHON


@pytest.fixture(scope="session")
def tiny(server_python, tmp_path_factory) -> Path:
    """A random two-layer Llama with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    script = Path(__file__).with_name("make_tiny_model.py")
    subprocess.run([server_python, script, folder], check=True, capture_output=True, timeout=120)
    return folder


class Reference:
    """Hugging Face's logprobs of the same model, from a process of the server's environment."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def logprobs(self, questions: list[dict]) -> list[list[float]]:
        """One list a question: {"ids", "temperature", "adapter" (a PEFT folder or "")}; for all ids but the first."""
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
