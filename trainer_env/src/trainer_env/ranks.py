"""The trainer's processes, one a GPU: which one this is, and what all of them agree on.

Numbered as torch's launcher does it. The first one has the server, the files and the terminal.
"""

import os

WORD_BYTES = 64


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

        state = PartialState(cpu=not on_gpu)
        if not on_gpu:
            state.device = torch.device("cpu")  # Its own cpu:0 is one that torch.load restores no optimizer to.


def any_of(value: bool) -> bool:  # noqa: FBT001 (it is a value, no switch)
    """Whether it is so in any process. Each has to call it."""
    return bool(_together([float(value)], "MAX")[0]) if count() > 1 else value


def total(value: float) -> float:
    """The sum over all processes. Each has to call it."""
    return _together([value], "SUM")[0] if count() > 1 else value


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
    from torch import distributed

    device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(tensor, op=getattr(distributed.ReduceOp, how))
    return tensor.tolist()
