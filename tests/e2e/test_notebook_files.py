"""Every notebook, from its first cell to its last, in a real kernel of the trainer's environment.

The quick start asks a real engine; the others do with TANDEM_TEST_FULL=1, and else the fake one.
"""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from kernels import register
from runs import FAKE, ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FULL = os.environ.get("TANDEM_TEST_FULL") == "1"
SMALL = {
    "quick_start": {"OVERRIDES": ["grpo.max_steps=3", "grpo.save_steps=1"]},
    "one_gpu": {"OVERRIDES": ["grpo.max_steps=2", "evaluation.before=false", "evaluation.after=false"]},
    "own_reward_and_data": {"OVERRIDES": ["grpo.max_steps=2", "data.eval_size=4"]},
    "compare": {
        "OVERRIDES": ["grpo.max_steps=2", "data.eval_size=2", "evaluation.before=false", "evaluation.after=true"],
        "CHANGES": {"a": ["grpo.learning_rate=3e-4"], "b": ["grpo.learning_rate=3e-5"]},
    },
}
"""What takes the place of a notebook's parameters, beside the configuration."""

SHOWN = {
    "quick_start": ["<svg", "held-out sums:", "report.html", "version=0", "version=3"],
    "one_gpu": ["two GPUs", "time-share", "step 2: rollout"],
    "own_reward_and_data": ["mean ", "<svg"],
    "compare": ["image/svg+xml", "last 4 steps", "compare.html"],
}


@pytest.fixture(scope="module")
def registered(tmp_path_factory):
    return register(tmp_path_factory.mktemp("jupyter"))


@pytest.fixture(scope="module")
def chatting(lab, tmp_path_factory) -> Path:
    """A random model with the fake engine's vocabulary and a chat template."""
    model = Path(shutil.copytree(lab.tiny(), tmp_path_factory.mktemp("model") / "chatting"))
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    return model


def parameters(name: str, model: Path) -> str:
    """The cell that comes after the notebook's own parameters. model: for the fake engine."""
    small = dict(SMALL[name])
    if name != "quick_start" and not FULL:
        faked = [f"model.name={model}", f"server.engine_command={json.dumps(FAKE)}", 'rollout.on_sync_mismatch="warn"']
        small["OVERRIDES"] = [*small["OVERRIDES"], *faked]
    return "\n".join(f"{key} = {value!r}" for key, value in {"CONFIG": "smoke", **small}.items())


def shown(notebook: nbformat.NotebookNode) -> str:
    """All outputs as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "\n".join(json.dumps(output, ensure_ascii=False) for output in outputs)


def test_each_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS} == SMALL.keys() == SHOWN.keys()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "tandem"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, registered, chatting, tmp_path, monkeypatch):
    for name, value in {**registered, "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(path, folder)
    notebook = nbformat.read(path, as_version=4)
    (index,) = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
    notebook.cells.insert(index + 1, nbformat.v4.new_code_cell(parameters(path.stem, chatting)))
    # With a kernel manager of its own, it ends the kernel as well.
    NotebookClient(notebook, kernel_name="tandem", timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    text = shown(notebook)
    assert [part for part in SHOWN[path.stem] if part not in text] == [], text[:4000]
    assert list((tmp_path / "runs").glob("*/summary.json"))
