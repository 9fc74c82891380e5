"""How much GPU memory sleep gives back is measured, and waited for; it is not believed."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from server_env.gpus import gpu_memory
from server_env.gpus.gpu_memory import of_each, used_bytes
from server_env.gpus.sleeping import Sleeper


class NVMLError(Exception):
    pass


class Driver:
    """NVML as far as it is asked here. used: by GPU. later: readings of the first one that are still to come."""

    NVMLError = NVMLError

    def __init__(self, *used):
        self.used = list(used)
        self.uuids = [f"GPU-{index}abc" for index in range(len(used))]
        self.later = []

    def nvmlInit(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index >= len(self.used):
            raise NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        if uuid not in self.uuids:
            raise NVMLError
        return self.uuids.index(uuid)

    def nvmlDeviceGetUUID(self, index):  # noqa: N802
        return self.uuids[index]

    def nvmlDeviceGetMemoryInfo(self, index):  # noqa: N802
        if self.later and index == 0:
            self.used[0] = self.later.pop(0)
        return SimpleNamespace(used=self.used[index], free=1000 - self.used[index], total=1000)


@pytest.fixture
def driver(monkeypatch):
    def install(*used):
        driver = Driver(*used)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        return driver

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


class Engines:
    """They say that they sleep; what that does to the memory in use is another matter."""

    class facts:  # noqa: N801 (as Replicas has it)
        capabilities = frozenset({"sleep"})

    def __init__(self, driver, later):
        self._driver, self._later = driver, later

    async def turn(self, level):
        if level == "asleep":
            self._driver.later = list(self._later)


@pytest.mark.parametrize(
    ("visible", "used"),
    [(None, 7), ("1", 2), ("2,0", 5), ("GPU-1abc", 2), ("GPU-2", 4), ("0,9,1", 1), ("", 0), ("-1", 0), ("GPU-9", 0)],
)
def test_it_is_the_sum_over_the_gpus_that_this_process_may_see(driver, monkeypatch, visible, used):
    driver(1, 2, 4)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert used_bytes() == used


def test_without_a_driver_it_is_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert used_bytes() == 0
    assert of_each({}) == ()


def test_what_is_free_is_read_of_the_gpus_that_another_process_will_see_in_its_order(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    driver(1, 2, 4)
    assert of_each({"CUDA_VISIBLE_DEVICES": "2,1"}) == ((996, 1000), (998, 1000))
    assert [gpu.free for gpu in of_each({})] == [999, 998, 996]


def test_a_gpu_whose_memory_the_driver_does_not_tell_is_not_known(driver, monkeypatch):
    def refuse(_):
        raise NVMLError

    monkeypatch.setattr(driver(1), "nvmlDeviceGetMemoryInfo", refuse)
    assert of_each({}) == ()


@pytest.mark.parametrize(
    ("later", "freed"),
    [
        ([300], 700),
        ([1000, 1000, 1000, 600, 300], 700),  # The driver counts it a while later, and not in one go.
        ([1000], 0),
        ([1100], 0),
    ],
)
async def test_sleep_waits_until_memory_is_free_and_says_how_much(driver, monkeypatch, later, freed):
    monkeypatch.setattr(gpu_memory, "SETTLE_S", 60.0 if freed else 0.1)
    driver = driver(1000)
    engines: Any = Engines(driver, later)
    assert (await Sleeper(engines).sleep()).freed_bytes == freed
