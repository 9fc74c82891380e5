"""How the trainer's processes meet."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest

from trainer_env import ranks


@pytest.fixture
def joined(monkeypatch):
    """What torch's process group is made with."""
    found: dict[str, object] = {}

    def init_process_group(backend, **settings):
        found.update(settings, backend=backend)

    torch = SimpleNamespace(
        cuda=SimpleNamespace(set_device=lambda _: None),
        distributed=SimpleNamespace(init_process_group=init_process_group),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "accelerate", SimpleNamespace(PartialState=lambda **_: None))
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", ranks.MEETING: "/tmp/meeting"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    return found


@pytest.mark.parametrize(("on_gpu", "backend"), [(True, "nccl"), (False, "gloo")])
def test_processes_wait_for_one_another_for_as_long_as_the_first_may_be_busy(joined, on_gpu, backend):
    ranks.join(on_gpu=on_gpu)
    assert (joined["backend"], joined["rank"], joined["world_size"]) == (backend, 1, 2)
    assert joined["timeout"] >= timedelta(hours=12)  # An evaluation by a judge; torch's own limit is minutes.
