"""GPU memory while something runs: the peak of each half, and of each GPU."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import psutil

EVERY_S = 0.2

Families = Callable[[], Mapping[str, set[int]]]
"""Who belongs to which half now: process ids."""


def family(pid: int) -> set[int]:
    """A process and all its descendants that live."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return {pid, *(child.pid for child in root.children(recursive=True))}
    return set()


class GpuUse:
    """Samples every GPU that the driver knows while it is open: `with GpuUse(families) as use: …`.

    Where the driver tells nobody's share (containers often hide the processes), halves has no entries.
    """

    def __init__(self, families: Families) -> None:
        self.halves: dict[str, int] = {}
        """Peak bytes of each half, on all GPUs together."""
        self.gpus: dict[str, int] = {}
        """Peak bytes in use on each GPU, by its index, whoever held them."""
        self._families = families
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return self
        self._nvml = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._nvml:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_S):
            with contextlib.suppress(self._nvml.NVMLError, psutil.Error):
                self._sample()

    def _sample(self) -> None:
        held: dict[int, int] = {}
        for index, handle in enumerate(self._handles):
            _raise_to(self.gpus, str(index), int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                held[process.pid] = held.get(process.pid, 0) + (process.usedGpuMemory or 0)
        for half, pids in self._families().items():
            if together := _sum(held, pids):
                _raise_to(self.halves, half, together)


def device_names() -> list[str]:
    """The GPUs' names, none without a driver."""
    with _devices() as (nvml, handles):
        return [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]


def in_use() -> list[int]:
    """Bytes of each GPU that anybody holds, none without a driver."""
    with _devices() as (nvml, handles):
        return [int(nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]


@contextlib.contextmanager
def _devices() -> Iterator[tuple[Any, list[Any]]]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield pynvml, []
        return
    try:
        yield pynvml, [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _sum(held: Mapping[int, int], pids: Iterable[int]) -> int:
    return sum(held.get(pid, 0) for pid in pids)


def _raise_to(peaks: dict[str, int], name: str, value: int) -> None:
    peaks[name] = max(value, peaks.get(name, 0))
