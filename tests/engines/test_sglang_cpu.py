"""What SGLang lacks on a machine without a GPU: each stand-in does its work, and is still needed.

When one is needed no longer, its test here fails: then remove the stand-in, and its test.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from server_env.engines.sglang import CPU_STAND_INS
from server_env.supervision.environment import cleaned

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

USES_KERNELS = """
import torch
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool_func as assign
rows = torch.zeros((3, 6), dtype=torch.int32)
assign(torch.tensor([2, 0]), rows, torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([7, 8, 9, 10]), 2)
assert rows.tolist() == [[9, 10, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]], rows
import sgl_kernel
try:
    sgl_kernel.anything_else(1)
except NotImplementedError as error:
    assert "anything_else" in str(error)
else:
    raise SystemExit("a kernel that is not there was called")
"""

USES_TORCHVISION = "import torchvision.transforms.v2"

USES_PINNED_MEMORY = """
from types import SimpleNamespace as Some
import torch
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
batch = Some(batch_size=2, forward_mode=ForwardMode.DECODE, spec_info=None, input_ids=torch.tensor([5, 6]))
backend = TorchNativeLoRABackend(max_loras_per_batch=2, device=torch.device("cpu"))
backend.prepare_lora_batch(batch, [0, 1], [4, 4], [1.0, 1.0], use_cuda_graph=False)
"""

STAND_INS = {
    "kernels": ("last/sgl_kernel.py", USES_KERNELS, "sgl_kernel"),
    "torchvision": ("torchvision_operators.py", USES_TORCHVISION, "torchvision::nms does not exist"),
    "pinned memory": ("pinned_memory.py", USES_PINNED_MEMORY, "pin"),
}
"""Which file, what SGLang does with it, and what it says without."""

NOTHING = "def declare(): pass\ndef ignore(): pass\n"


def run(python: Path, stand_ins: Path, code: str) -> "subprocess.CompletedProcess[str]":
    variables = cleaned(os.environ, "cpu")
    variables |= {"PYTHONPATH": str(stand_ins), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run([python, "-c", code], env=variables, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("name", STAND_INS)
def test_with_the_stand_ins_sglang_works(python_of, name):
    _, code, _ = STAND_INS[name]
    done = run(python_of("sglang"), CPU_STAND_INS, code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", STAND_INS)
def test_a_stand_in_is_still_needed(python_of, tmp_path, name):
    file, code, says = STAND_INS[name]
    others = tmp_path / "sglang_cpu"
    shutil.copytree(CPU_STAND_INS, others, ignore=shutil.ignore_patterns("__pycache__"))
    (others / file).unlink()
    if name != "kernels":
        (others / file).write_text(NOTHING)
    done = run(python_of("sglang"), others, code)
    assert done.returncode != 0, f"SGLang does without {file}: remove it"
    assert says in done.stderr


def test_a_process_that_needs_none_of_them_pays_nothing(python_of):
    """Every Python that the engine starts runs sitecustomize.py."""
    code = "import sys; assert not {'torch', 'sgl_kernel', 'sglang'} & set(sys.modules), sorted(sys.modules)"
    done = run(python_of("sglang"), CPU_STAND_INS, code)
    assert done.returncode == 0, done.stderr


def test_real_kernels_win_over_the_stand_in(python_of, tmp_path):
    (tmp_path / "sgl_kernel.py").write_text("real = True\n")
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r}); import sgl_kernel; assert sgl_kernel.real is True"
    assert run(python_of("sglang"), CPU_STAND_INS, code).returncode == 0
    code = "import sys; assert sys.path[-1].endswith('last'), sys.path"
    assert run(python_of("sglang"), CPU_STAND_INS, code).returncode == 0
