"""Kernels of the trainer's environment, as `setup_envs.sh --notebook` registers them, and cells that are run in one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from runs import ROOT, VENVS

FOLDERS = ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")
START_S = 120.0


def register(folder: Path) -> dict[str, str]:
    """Have setup_envs.sh register the kernel in a folder of ours; the variables by which Jupyter finds it."""
    variables = {name: str(folder / name.lower()) for name in FOLDERS}
    subprocess.run(
        ["bash", "scripts/setup_envs.sh", "--only", "trainer", "--notebook", "--venvs", str(VENVS)],
        cwd=ROOT,
        env=os.environ | variables,
        check=True,
        capture_output=True,
        timeout=600,
    )
    return variables


class Cell:
    """What a cell did. shown: what it printed; html: what it displayed, as last drawn; error: its text."""

    def __init__(self) -> None:
        self.shown = ""
        self.error = ""
        self._html: dict[str, str] = {}

    @property
    def html(self) -> str:
        return "\n".join(self._html.values())

    def take_in(self, kind: str, content: dict) -> None:
        """One message of the kernel."""
        match kind:
            case "stream":
                self.shown += content["text"]
            case "error":
                self.error = "\n".join([content["ename"], content["evalue"], *content["traceback"]])
            case "display_data" | "update_display_data" | "execute_result":
                key = content.get("transient", {}).get("display_id") or str(len(self._html))
                self._html[key] = content["data"].get("text/html", "")
                if kind == "execute_result":
                    self.shown += content["data"].get("text/plain", "")


class Kernel:
    """A running kernel. Cells that run at the same time are not for tests."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)

    @property
    def pid(self) -> int:
        provisioner = self.manager.provisioner
        assert provisioner
        return provisioner.pid  # pyright: ignore[reportAttributeAccessIssue]

    def run(self, code: str, timeout_s: float = 300.0, *, seen=lambda cell: None) -> Cell:
        """Run a cell to its end. seen: called with the cell as far as it is, at each of its messages."""
        cell = Cell()

        def note(message) -> None:
            cell.take_in(message["msg_type"], message["content"])
            seen(cell)

        self.client.execute_interactive(code, timeout=timeout_s, output_hook=note, allow_stdin=False)
        return cell

    def good(self, code: str, timeout_s: float = 300.0) -> Cell:
        """The same, for a cell that must not fail."""
        cell = self.run(code, timeout_s)
        assert not cell.error, cell.error
        return cell

    def begin(self, code: str) -> None:
        """Run a cell, and do not wait."""
        self.client.execute(code)

    def kill(self) -> None:
        """As the system would when memory runs out."""
        os.kill(self.pid, signal.SIGKILL)


@contextmanager
def kernel(variables: dict[str, str], cwd: Path) -> Iterator[Kernel]:
    """A fresh kernel in a working directory."""
    spec_manager = KernelSpecManager(kernel_dirs=[str(Path(variables["JUPYTER_DATA_DIR"]) / "kernels")])
    manager = KernelManager(kernel_name="tandem", kernel_spec_manager=spec_manager)
    manager.start_kernel(cwd=str(cwd), env=os.environ | variables)
    it = None
    try:
        it = Kernel(manager)
        yield it
    finally:
        if it:
            it.client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
