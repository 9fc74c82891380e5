"""What SGLang lacks on a machine without a GPU. Python runs this file at its start when this folder is on PYTHONPATH.

Only the engine child of a CPU run has it there (see `engines/sglang.py`), with all processes that it
starts. Nothing is imported here but the standard library: each stand-in takes effect when the module that needs it is
imported, and says itself when it can be removed. `tests/engines/test_sglang_cpu.py` fails when that day has come.
"""

import importlib.abc
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent


class Before(importlib.abc.MetaPathFinder):
    """Does something once, before the first import of a module, and finds nothing itself."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module = module
        self._action = action

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Python asks every finder for every module."""
        if fullname == self._module and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._action()


def declare_operators() -> None:
    """See torchvision_operators."""
    import torchvision_operators

    torchvision_operators.declare()


def ignore_pinning() -> None:
    """See pinned_memory."""
    import pinned_memory

    pinned_memory.ignore()


sys.meta_path[:0] = [Before("torchvision", declare_operators), Before("sglang.srt.lora", ignore_pinning)]
# Behind site-packages, so that real kernels win wherever somebody has installed them.
sys.path.append(str(HERE / "last"))
