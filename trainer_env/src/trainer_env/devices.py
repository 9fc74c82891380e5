"""What this machine has: its GPUs with their free memory, its cores, and which of the GPUs the user lets us see."""

import math
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

VISIBLE = "CUDA_VISIBLE_DEVICES"


class _Visible(NamedTuple):
    """CUDA_VISIBLE_DEVICES as the user had it, and as it was set here."""

    users: str | None
    ours: str | None


_confined: _Visible | None = None


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or one MIG slice of it. Sizes in bytes; None: not known."""

    id: str
    """What CUDA_VISIBLE_DEVICES calls it: an index, a `GPU-…` or a `MIG-…`."""
    uuid: str = ""
    name: str = "GPU"
    total_bytes: int | None = None
    free_bytes: int | None = None
    holders: tuple[str, ...] = ()
    """Processes that hold its memory, as people read them."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability, such as (9, 0)."""
    part_of: str = ""
    """The index of the GPU that this is a slice of."""

    @property
    def is_slice(self) -> bool:
        """Whether it is a MIG slice: CUDA gives a process one of them, however many are visible."""
        return self.id.startswith("MIG-")

    def answers_to(self, name: str) -> bool:
        """Whether a name means this device. As in CUDA, a UUID may be shortened while it stays unique."""
        return name == self.id or (bool(self.uuid) and "-" in name and self.uuid.startswith(name))


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """All GPUs of the machine, and the cores that we may use."""

    gpus: tuple[Device, ...] = ()
    left_out: tuple[str, ...] = ()
    """What the driver says of GPUs that it counts and that do not answer, for people."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES as the user has it; None: not set."""
    cores: int = 1
    cpu_build: bool = False
    """The installed torch is one for CPUs: it cannot use a GPU."""

    def find(self, name: str) -> Device:
        """The device of that name; one that detection does not know is taken at its word."""
        return next((device for device in self.gpus if device.answers_to(name)), Device(id=name))

    def usable(self) -> tuple[Device, ...]:
        """The devices that CUDA_VISIBLE_DEVICES leaves, in its order; none where the driver or torch knows none.

        As in CUDA, the list ends at an id of -1 and at an index that does not exist. Other ids that detection does not
        know are left to CUDA. The index of a GPU that is cut stands for its slices.
        """
        if self.cpu_build:
            return ()
        if self.visible is None or not self.gpus:
            return self.gpus
        found: dict[str, Device] = {}
        for name in (part.strip() for part in self.visible.split(",")):
            slices = [device for device in self.gpus if name and device.part_of == name]
            device = self.find(name)
            if name in ("", "-1", "NoDevFiles") or (name.isdecimal() and not device.uuid and not slices):
                break
            found |= {device.id: device for device in slices or [device]}
        return tuple(found.values())


def detect(environment: Mapping[str, str] = os.environ) -> Devices:
    """Ask the driver and the operating system. Without a driver there are no GPUs.

    What `confine` has hidden from this process is there all the same: another run may be planned for it.
    """
    gpus, left_out = _gpus()
    return Devices(
        gpus=gpus,
        left_out=left_out,
        visible=_users_visible() if environment is os.environ else environment.get(VISIBLE),
        cores=available_cores(),
        cpu_build=_torch_version().endswith("+cpu"),
    )


def confine(variables: Mapping[str, str]) -> None:
    """Set this process's own variables for its half's devices and threads: torch and CUDA read them as they are
    imported.
    """
    global _confined  # noqa: PLW0603 (as the variables are, it is one for the process)
    _confined = _Visible(_users_visible(), variables.get(VISIBLE, os.environ.get(VISIBLE)))
    os.environ.update(variables)


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores that this process may use: what it is bound to, or the container's quota if that is less."""
    bound = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text(encoding="ascii").split()
        return bound if allowed == "max" else max(1, min(bound, math.ceil(int(allowed) / int(period))))
    except (OSError, ValueError):
        return bound


def _users_visible() -> str | None:
    visible = os.environ.get(VISIBLE)
    return _confined.users if _confined and visible == _confined.ours else visible


def _torch_version() -> str:
    """Torch's version, without the seconds that importing it takes; empty where it is not installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _gpus() -> tuple[tuple[Device, ...], tuple[str, ...]]:
    """Those that answer, and what to say of the others."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ()
    found, left_out = list[Device](), list[str]()
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                found += list(_parts(pynvml, index, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError as error:  # It fell off the bus, say.
                left_out.append(f"GPU {index} does not answer: {error}; nvidia-smi tells more")
    finally:
        pynvml.nvmlShutdown()
    return tuple(found), tuple(left_out)


def _parts(pynvml: Any, index: int, handle: Any) -> Iterator[Device]:
    """A GPU; or its slices, when it is cut: CUDA offers the whole no longer."""
    slices = list(_slices(pynvml, handle))
    if not slices:
        yield _device(pynvml, handle, str(index))
    for part in slices:
        yield msgspec.structs.replace(_device(pynvml, part, pynvml.nvmlDeviceGetUUID(part)), part_of=str(index))


def _slices(pynvml: Any, handle: Any) -> Iterator[Any]:
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return
    for place in range(count):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
        except pynvml.NVMLError:
            continue


def _device(pynvml: Any, handle: Any, name: str) -> Device:
    memory = _memory(pynvml, handle)
    return Device(
        id=name,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        total_bytes=memory and memory.total,
        free_bytes=memory and memory.free,
        holders=tuple(_holders(pynvml, handle)),
        capability=_capability(pynvml, handle),
    )


def _memory(pynvml: Any, handle: Any) -> Any:
    """None of a GPU without memory of its own."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise


def _capability(pynvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return major, minor


def _holders(pynvml: Any, handle: Any) -> Iterator[str]:
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return
    for process in processes:
        try:
            program = Path(f"/proc/{process.pid}/comm").read_text(encoding="utf-8").strip()
        except OSError:
            program = "a process of another container"
        held = f", {gib(process.usedGpuMemory)} GiB" if process.usedGpuMemory else ""
        yield f"pid {process.pid} ({program}{held})"


def gib(size: int) -> str:
    """Bytes in GiB, for people."""
    return f"{size / 2**30:.1f}"
