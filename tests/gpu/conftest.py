"""Tests that need a CUDA GPU; elsewhere they are skipped. See docs/testing.md for how they are run."""

import json
import os
from pathlib import Path

import pytest

from served import environment_python, tiny_llama


def gpus() -> int:
    """GPUs that the driver knows and CUDA_VISIBLE_DEVICES does not hide."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except Exception:  # noqa: BLE001 (no library, no driver, no GPU: it is all the same here)
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else len([name for name in visible.split(",") if name not in ("", "-1")])


def pytest_collection_modifyitems(items):
    found = gpus()
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark and found < (wanted := mark.kwargs.get("count", 1)):
            item.add_marker(
                pytest.mark.skip(reason=f"needs {wanted} CUDA GPU{'s' * (wanted > 1)}, and {found} are here")
            )


@pytest.fixture(scope="session")
def engine_settings():
    """Settings of an engine's own for this machine, from TANDEM_TEST_ENGINES: {"sglang": {...}}."""
    return json.loads(os.environ.get("TANDEM_TEST_ENGINES", "{}"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random two-layer Llama with its tokenizer."""
    return tiny_llama(environment_python("trainer"), tmp_path_factory.mktemp("models") / "tiny")
