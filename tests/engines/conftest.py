"""One real engine and one tiny random model for all tests of a module: a real start takes half a minute or more."""

import json
import subprocess
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
    """Hugging Face's logprobs of the same model, in a process of the server's environment."""

    def __init__(self, python: Path, model: Path) -> None:
        self._command = [str(python), str(Path(__file__).with_name("reference.py")), str(model)]

    def logprobs(self, questions: list[dict]) -> list[list[float]]:
        """One list a question: {"ids", "temperature", "adapter" (a PEFT folder or "")}; for all ids but the first."""
        done = subprocess.run(
            self._command, input=json.dumps(questions), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def reference(server_python, tiny) -> Reference:
    return Reference(server_python, tiny)
