"""Which devices each half gets. A plan is a pure function of the config and of what the machine has."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from bridge.errors import ConfigError
from trainer_env.config import PlacementConfig
from trainer_env.devices import Device, Devices, gib
from trainer_env.memory_share import LEAST_SHARED, ModelSize, fits, require_fit, share, trainer_bytes

Mode = Literal["split", "shared", "time-share", "cpu"]

_LEAST_FREE = 2**30
_ON_GPUS = ("split", "shared", "time-share")


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run. Threads of 0 are left to the half itself."""

    mode: Mode
    server: tuple[Device, ...] = ()
    trainer: tuple[Device, ...] = ()
    memory_share: float | None = None
    """Part of each server GPU that the engine may take; None: its own default."""
    ranks: int = 1
    """Trainer processes: one a GPU."""
    cores: int = 1
    server_threads: int = 0
    trainer_threads: int = 0
    left_out: tuple[str, ...] = ()
    """What to say of GPUs that are there and cannot be used."""

    def lines(self) -> list[str]:
        """The plan for people, a line each."""
        return [*self._plan(), *(f"  left out {text}" for text in self.left_out)]

    def _plan(self) -> list[str]:
        if self.mode == "cpu":
            threads = [f"{count} threads" if count else "as many threads as it likes" for count in self._threads()]
            return [
                f"placement  cpu: no GPU, {self.cores} cores",
                f"  server   {threads[0]}",
                f"  trainer  {threads[1]}" + (f" for each of {self.ranks} processes" if self.ranks > 1 else ""),
            ]
        share = "" if self.memory_share is None else f", engine takes up to {self.memory_share:.0%}"
        if self.mode in ("time-share", "shared"):
            how = "in turns" if self.mode == "time-share" else "both at once"
            return [f"placement  {self.mode}: one GPU, {how}", f"  both     {_described(self.server[0])}{share}"]
        return [
            "placement  split: each half has its own GPUs",
            *(f"  server   {_described(device)}{share}" for device in self.server),
            *(f"  trainer  {_described(device)}" for device in self.trainer),
        ]

    def server_environment(self) -> dict[str, str]:
        """Environment variables for tandem-server and its engine."""
        return _environment(self.server, self.server_threads)

    def trainer_environment(self) -> dict[str, str]:
        """Environment variables for the trainer; to be set before torch is imported."""
        return _environment(self.trainer, self.trainer_threads)

    def free_bytes(self) -> dict[str, int]:
        """What was free on each of the server's GPUs, by its id, where the driver said."""
        return {device.id: device.free_bytes for device in self.server if device.free_bytes is not None}

    def server_settings(self, user: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What the plan means in the terms of `[server]`. user: what is set there by hand, which wins.

        Raises ConfigError when the server's GPUs are no whole number for each of its engines, or another than is set.
        """
        if self.mode == "cpu":
            return {"device": "cpu"}
        each = _gpus_each(len(self.server), user or {}, self.mode)
        if each > 1:
            _require_one_slice("server", self.server)
        settings: dict[str, Any] = {"device": "cuda", "tensor_parallel": each}
        if self.memory_share is not None:
            settings["memory_share"] = self.memory_share
        return settings | ({"sleep": True} if self.mode == "time-share" else {})

    def to_json(self) -> bytes:
        """The content of placement.json."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def _threads(self) -> tuple[int, int]:
        return self.server_threads, self.trainer_threads


def plan(
    config: PlacementConfig,
    devices: Devices,
    *,
    overlap: bool = False,
    server: Mapping[str, Any] | None = None,
    model: ModelSize | None = None,
) -> Placement:
    """Explicit devices win, then CUDA_VISIBLE_DEVICES, then what is there. Raises ConfigError.

    overlap: the halves work at the same time; on a CPU they then share the cores instead of taking turns. server: the
    user's `[server]`, which may say its engine, how many GPUs that half needs, and how much of their memory. model: its
    size, where that is known: one GPU is shared without turns when both halves fit, and a model that cannot fit is
    refused.
    """
    server_ids, trainer_ids = ([str(item) for item in ids] for ids in (config.server_gpus, config.trainer_gpus))
    given = bool(server_ids or trainer_ids)
    mode = _mode(config, devices, given=given)
    if mode == "cpu":
        if given:
            raise ConfigError(
                "placement: GPUs are named for a run on the CPU.",
                remedy="Leave out --server-gpus and --trainer-gpus, or --placement cpu and --accelerator cpu.",
            )
        return _on_cpu(config, devices, overlap=overlap)
    backend = str((server or {}).get("backend", "vllm"))
    serving, training = _named(server_ids, devices, "server"), _named(trainer_ids, devices, "trainer")
    if mode == "split":
        serving, training = _two_sets(serving, training, devices, _gpus_wanted(server or {}))
    else:
        device = _one_gpu(serving, training, devices, mode)
        serving, training = (device,), (device,)
        if config.mode == "auto" and _fit_at_once(config, device, model, backend):
            mode = "shared"
    _require_one_slice("trainer", training)
    _require_a_rank_each(config, training)
    for device in {device.id: device for device in (*serving, *training)}.values():
        _require_room(device)
    beside = trainer_bytes(mode, model, _given_bytes(config)) or 0
    engines = share(mode, serving, model, beside, backend)
    if mode != "split" and "memory_share" not in (server or {}):
        require_fit(mode, engines, serving[0], model, beside, backend)
    return Placement(
        mode=mode,
        server=serving,
        trainer=training,
        ranks=len(training),
        memory_share=engines,
        cores=devices.cores,
        server_threads=config.server_threads,
        trainer_threads=config.trainer_threads,
        left_out=devices.left_out,
    )


def depends_on_weights(config: PlacementConfig, devices: Devices) -> bool:
    """Whether `plan` goes by how large the model's weights are: one GPU, for both halves. Raises ConfigError."""
    return _mode(config, devices, given=bool(config.server_gpus or config.trainer_gpus)) in ("shared", "time-share")


def _mode(config: PlacementConfig, devices: Devices, *, given: bool) -> Mode:
    wanted, usable = config.mode, len(devices.usable())
    if config.accelerator == "cpu":
        if wanted in _ON_GPUS:
            raise ConfigError(
                f"placement.mode: {wanted} shares out GPUs, and placement.accelerator is cpu.",
                remedy="Leave one of the two out.",
            )
        return "cpu"
    if wanted == "cpu" and config.accelerator == "auto":
        return "cpu"
    asked = given or wanted in _ON_GPUS or config.accelerator == "cuda"
    if asked and devices.cpu_build:
        raise ConfigError(
            "placement: a GPU is asked for, and the installed environments are those for the CPU.",
            remedy="Run scripts/setup_envs.sh --accelerator cuda, or use --placement cpu.",
        )
    if asked and not usable and not given:
        raise ConfigError(
            "placement: a GPU is asked for, and none is visible.",
            why="nvidia-smi shows what the driver sees; an empty CUDA_VISIBLE_DEVICES hides all.",
            remedy="Use --placement cpu, or make a GPU visible; scripts/doctor.py tells more.",
        )
    if wanted == "cpu":
        raise ConfigError(
            "placement.mode: cpu uses no GPU, and placement.accelerator is cuda.", remedy="Leave one of the two out."
        )
    if wanted != "auto":
        return wanted
    if given or usable > 1:
        return "split"
    return "time-share" if usable else "cpu"


def _on_cpu(config: PlacementConfig, devices: Devices, *, overlap: bool) -> Placement:
    # In turns each half may use all cores. Engines bind their threads themselves, so theirs is set only to share.
    ranks, cores = config.trainer_ranks or 1, devices.cores
    trainer = config.trainer_threads or max(1, (cores - cores // 2 if overlap else cores) // ranks)
    server = config.server_threads or (max(1, cores // 2) if overlap else 0)
    return Placement(
        mode="cpu",
        ranks=ranks,
        cores=cores,
        server_threads=server,
        trainer_threads=trainer,
        left_out=devices.left_out,
    )


def _require_a_rank_each(config: PlacementConfig, trainer: tuple[Device, ...]) -> None:
    if config.trainer_ranks not in (0, len(trainer)):
        named = ", ".join(device.id for device in trainer)
        raise ConfigError(
            f"placement.trainer_ranks: {config.trainer_ranks} processes are asked for, and one trains on each of the "
            f"trainer's GPUs: {named}.",
            remedy="Leave it out, name as many GPUs with --trainer-gpus, or use --placement cpu.",
        )


def _named(ids: Sequence[str], devices: Devices, half: str) -> tuple[Device, ...]:
    """The devices that were named for a half, each once."""
    found = tuple(devices.find(name) for name in ids)
    for name, device in zip(ids, found, strict=True):
        if name.isdecimal() and not device.uuid and devices.gpus:
            known = ", ".join(device.id for device in devices.gpus)
            raise ConfigError(f"placement.{half}_gpus: there is no GPU {name}; there are: {known}.")
    if len({device.id for device in found}) < len(found):
        raise ConfigError(f"placement.{half}_gpus: names a GPU twice: {', '.join(ids)}.")
    return found


def _given_bytes(config: PlacementConfig) -> int:
    return int(config.trainer_gib * 2**30)


def _fit_at_once(config: PlacementConfig, device: Device, model: ModelSize | None, backend: str) -> bool:
    """Whether both halves are known to fit on one GPU, each keeping its memory."""
    beside = trainer_bytes("shared", model, _given_bytes(config))
    if beside is None:
        return False
    engines = share("shared", [device], model, beside, backend) or 0
    return engines >= LEAST_SHARED and fits(engines, device, model, backend)


def _one_gpu(server: tuple[Device, ...], trainer: tuple[Device, ...], devices: Devices, mode: Mode) -> Device:
    named = {device.id: device for device in (*server, *trainer)}
    if len(named) > 1:
        raise ConfigError(
            f"placement: {mode} uses one GPU for both halves, and {', '.join(named)} are named.",
            remedy="Name one, or use --placement split.",
        )
    return next(iter(named.values()), None) or devices.usable()[0]


def _two_sets(
    server: tuple[Device, ...], trainer: tuple[Device, ...], devices: Devices, wanted: int
) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    """Server and trainer devices of a split: the server on the first free ones, the trainer on all others that it can
    use together.
    """
    usable = devices.usable()
    server = server or _others(usable, trainer)[:wanted]
    trainer = trainer or _whole(_others(usable, server))
    shared = [device.id for device in server if device.id in {other.id for other in trainer}]
    if shared:
        raise ConfigError(
            f"placement: GPU {', '.join(shared)} is named for both halves.",
            remedy="Name different ones, or use --placement time-share to train and sample in turns on one.",
        )
    if not server or not trainer:
        raise ConfigError(
            f"placement: split needs a GPU for each half, and there is none left for the "
            f"{'trainer' if server else 'server'} (visible: {', '.join(d.id for d in usable) or 'none'}).",
            remedy="Use --placement time-share, or make more GPUs visible.",
        )
    return server, trainer


def _gpus_wanted(server: Mapping[str, Any]) -> int:
    """GPUs of this machine that the user's `[server]` asks for; 1 where it says nothing."""
    return max(1, _count(server, "data_parallel") * _count(server, "tensor_parallel") // _count(server, "nnodes"))


def _gpus_each(gpus: int, server: Mapping[str, Any], mode: Mode) -> int:
    """GPUs for one engine of the server's, on all its machines. Raises ConfigError when they do not come out even."""
    engines, wanted = _count(server, "data_parallel"), _gpus_wanted(server)
    even = gpus == wanted if "tensor_parallel" in server else gpus % engines == 0
    if engines > 1 and not even:
        raise ConfigError(
            f"server.data_parallel: {engines} engines of {wanted // engines} or more GPUs each, and the server has "
            f"{gpus}.",
            why="Each engine computes on server.tensor_parallel GPUs of its own.",
            remedy=f"Give it {wanted} with --server-gpus, or lower server.data_parallel.",
        )
    if engines == _count(server, "nnodes") == 1 and not even:
        raise ConfigError(
            f"server.tensor_parallel: it is {wanted}, and the number of the server's GPUs is {gpus}.",
            why="One engine computes on all of them." if mode == "split" else f"{mode} uses one GPU for both halves.",
            remedy="Leave it out: it follows from the GPUs. In split mode --server-gpus names as many as are wanted.",
        )
    return gpus * _count(server, "nnodes") // engines


def _count(server: Mapping[str, Any], name: str) -> int:
    """A count of the user's; what is no count is for the server half to refuse."""
    value = server.get(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _others(devices: Sequence[Device], taken: Sequence[Device]) -> tuple[Device, ...]:
    ids = {device.id for device in taken}
    return tuple(device for device in devices if device.id not in ids)


def _whole(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The whole GPUs; where there are only slices, the first."""
    return tuple(device for device in devices if not device.is_slice) or devices[:1]


def _require_one_slice(half: str, devices: Sequence[Device]) -> None:
    if len(devices) > 1 and any(device.is_slice for device in devices):
        raise ConfigError(
            f"placement: the {half} is to compute on {', '.join(device.id for device in devices)} together.",
            why="CUDA gives a process one MIG slice, and no GPU beside it.",
            remedy=f"Name one with --{half}-gpus, or whole GPUs"
            + (", or set server.data_parallel to their number." if half == "server" else "."),
        )


def _require_room(device: Device) -> None:
    if device.free_bytes is not None and device.free_bytes < _LEAST_FREE:
        raise ConfigError(
            f"placement: GPU {device.id} has {gib(device.free_bytes)} GiB free.",
            why=f"Its memory is held by {', '.join(device.holders) or 'processes that the driver does not name'}.",
            remedy="End them, or name other GPUs.",
        )


def _environment(devices: Sequence[Device], threads: int) -> dict[str, str]:
    # Indices are those of nvidia-smi only in the order of the bus; CUDA's own default is the fastest first.
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(device.id for device in devices), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return variables | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _described(device: Device) -> str:
    text = f"GPU {device.id}  {device.name}"
    if device.free_bytes is not None and device.total_bytes is not None:
        text += f", {gib(device.free_bytes)} of {gib(device.total_bytes)} GiB free"
    return text + (f", shared with {', '.join(device.holders)}" if device.holders else "")
