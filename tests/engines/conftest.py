"""Real engines and one tiny random model for all tests of a module: a real start takes half a minute or more."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from served import ROOT

VENVS = Path(os.environ.get("TANDEM_VENVS") or ROOT / ".venvs")


@pytest.fixture(scope="session")
def python_of():
    """The Python of a backend's environment; skips where it is not installed."""

    def python(backend: str) -> Path:
        path = VENVS / f"server-{backend}" / "bin" / "python"
        if not path.exists():
            pytest.skip(f"{path} is missing: bash scripts/setup_envs.sh --only server-{backend}")
        return path

    return python


@pytest.fixture(scope="session")
def server_python(python_of) -> Path:
    """A Python that has torch and transformers."""
    return python_of("vllm")


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
