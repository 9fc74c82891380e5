"""What the trainer fills in of `[server]`, and how long it waits for what it starts."""

from pathlib import Path

import pytest

from server_env.config import ServerConfig
from trainer_env import config as configs
from trainer_env.devices import Devices
from trainer_env.placement import plan
from trainer_env.serving.server_settings import LOAD_TIMEOUT_S, STARTUP_TIMEOUT_S, ready_within_s, server_settings

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def loaded(*overrides):
    return configs.load(DEMO, ['run="run"', *overrides])


def filled(*overrides):
    config = loaded(*overrides)
    return server_settings(config, "model", plan(config.placement, Devices(cores=2)))["server"]


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 120.0),
        (["rollout.timeout_s=600"], 200.0),
        (["rollout.timeout_s=600", "server.load_timeout_s=250"], 250.0),
        (["rollout.timeout_s=60"], 120.0),
        (["rollout.timeout_s=7200"], 300.0),
        (["rollout.timeout_s=60", "server.stall_timeout_s=50"], 50),
    ],
)
def test_a_request_whose_engine_hangs_has_time_left_when_that_is_replaced(overrides, seconds):
    assert filled(*overrides)["stall_timeout_s"] == seconds


def test_a_server_is_waited_for_longer_than_it_tries():
    assert ServerConfig().load_timeout_s == LOAD_TIMEOUT_S
    assert ServerConfig().startup_timeout_s == STARTUP_TIMEOUT_S < ready_within_s(loaded()) / 3
    assert ready_within_s(loaded("server.startup_timeout_s=5000")) > 3 * 5000
