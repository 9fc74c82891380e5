"""What a training leaves in memory, however it ended: the next one in this process needs the room."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from trainer_env.serving.turns import release_gpu_memory


@contextmanager
def letting_go() -> Iterator[None]:
    """Afterwards, what only this block used is given back: a trainer, its model and its optimizer hold one another.

    What is raised in here is told as before, but its frames, which a notebook keeps with it, forget their variables.
    """
    try:
        yield
    except BaseException as error:
        _forget_variables(error)
        raise
    finally:
        gc.collect()
        release_gpu_memory()


def _forget_variables(error: BaseException | None) -> None:
    """Of the frames of an error and of those that it came from."""
    seen: set[int] = set()
    while error and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
