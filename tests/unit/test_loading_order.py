"""On one GPU an engine starts beside the import of libraries, and sleeps before the trainer loads; with a GPU each the
halves load at once."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.protocol import Sleep
from trainer_env import config as configs
from trainer_env.devices import Device, Devices
from trainer_env.display import open_display
from trainer_env.placement import plan
from trainer_env.serving.turns import SLEEP
from trainer_env.training import Training
from trainer_env.training.interrupts import Interrupts

ROOT = Path(__file__).parents[2]
GIB = 2**30
TWO = tuple(Device(id=str(index), total_bytes=80 * GIB, free_bytes=79 * GIB) for index in range(2))


class LoadedEnough(Exception):
    pass


class Server:
    def __init__(self, order: list[str], capabilities: tuple[str, ...]) -> None:
        self.order = order
        self.welcome = SimpleNamespace(capabilities=capabilities)

    def ask(self, request: Any) -> None:
        assert isinstance(request, Sleep)
        self.order.append("asleep")


def loading_order(tmp_path, monkeypatch, mode: str, capabilities: tuple[str, ...] = (SLEEP,)) -> list[str]:
    order: list[str] = []
    server = Server(order, capabilities)
    config = configs.load(ROOT / "configs" / "demo.toml", [f'output_dir="{tmp_path}"', 'run="one"'])
    config.run_dir.mkdir(parents=True)

    def connected() -> Any:
        order.append("engine")
        return server

    def load_policy(self: Training) -> Any:
        order.append("trainer")
        return None

    def rollouts(self: Training, server: Any, policy: Any) -> Any:
        raise LoadedEnough

    monkeypatch.setattr(Training, "_libraries", lambda _: order.append("libraries"))
    monkeypatch.setattr(Training, "_load_policy", load_policy)
    monkeypatch.setattr(Training, "_fitting_data", lambda self, policy: self.data)
    monkeypatch.setattr(Training, "_rollouts", rollouts)
    training = Training(
        config=config,
        placement=plan(configs.PlacementConfig(mode=mode), Devices(gpus=TWO, cores=8)),  # type: ignore[arg-type]
        data=None,  # type: ignore[arg-type]
        rewards=[],
        model="model",
        serving=SimpleNamespace(died=lambda: None),  # type: ignore[arg-type]
        connected=connected,
        interrupts=Interrupts(print),
        display=open_display("plain", 1),
        resume=False,
    )
    with pytest.raises(LoadedEnough):
        training.run()
    return order


@pytest.mark.parametrize(
    ("mode", "capabilities", "expected"),
    [
        ("split", (SLEEP,), ["trainer", "engine"]),
        ("shared", (), ["libraries", "engine", "trainer", "engine"]),
        ("time-share", (SLEEP,), ["libraries", "engine", "asleep", "trainer", "engine"]),
        ("time-share", (), ["libraries", "engine", "trainer", "engine"]),
    ],
)
def test_an_engine_on_the_trainers_gpu_is_ready_before_the_trainer_loads(
    tmp_path, monkeypatch, mode, capabilities, expected
):
    assert loading_order(tmp_path, monkeypatch, mode, capabilities) == expected
