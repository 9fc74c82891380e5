"""The trainer's processes, one a GPU: which one this is, and what all of them agree on.

Numbered as torch's launcher does it. The first one has the server, the files and the terminal.
"""

import os
from datetime import timedelta

WORD_BYTES = 64
MEETING = "TANDEM_RANKS_MEETING"
"""Names the file in which the processes find one another. Torch's usual store would listen on every interface."""

LONGEST_WAIT = timedelta(days=1)
"""For the others in anything they do together. All but the first wait there while it evaluates, asks a judge or has a
server started again, and an evaluation as a whole has no limit: with NCCL, torch's own is ten minutes. A process that
ends is noticed elsewhere, by `launcher.py`."""


def rank() -> int:
    """Which of the processes this is, from 0."""
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(*, on_gpu: bool) -> None:
    """Meet the others, if there are any. The trainer would do so as well, but later."""
    if count() > 1:
        import torch
        from accelerate import PartialState

        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{os.environ[MEETING]}",
            rank=rank(),
            world_size=count(),
            timeout=LONGEST_WAIT,
        )
        if not on_gpu:
            # Accelerate's own cpu:0 is a device to which torch.load restores no optimizer.
            os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
        PartialState(cpu=not on_gpu)


def any_of(value: bool) -> bool:  # noqa: FBT001 (it is a value, no switch)
    """Whether it is so in any process. Each has to call it."""
    return bool(_together([float(value)], "MAX")[0]) if count() > 1 else value


def total(value: float) -> float:
    """The sum over all processes. Each has to call it."""
    return _together([value], "SUM")[0] if count() > 1 else value


def most(value: float) -> float:
    """The largest of all processes'. Each has to call it."""
    return _together([value], "MAX")[0] if count() > 1 else value


def word_of_the_first(word: str) -> str:
    """What the first process says; what the others give is not looked at. At most WORD_BYTES. Each has to call it."""
    if count() == 1:
        return word
    spoken = word.encode() if rank() == 0 else b""
    heard = _together([float(byte) for byte in spoken.ljust(WORD_BYTES, b"\0")], "MAX")
    return bytes(map(int, heard)).rstrip(b"\0").decode()


def _together(values: list[float], how: str) -> list[float]:
    """The values of all processes, joined element by element."""
    import torch

    device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, op=getattr(torch.distributed.ReduceOp, how))
    return tensor.tolist()
