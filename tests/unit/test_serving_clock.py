"""The client's clock for work stands still from one pulse without an engine to the next one with one."""

import pytest

from bridge.protocol import Pulse
from bridge.serving_clock import ServingClock


@pytest.mark.parametrize(
    ("pulses", "shows"),
    [
        ({}, 100),
        ({10: "ready", 50: "ready"}, 100),
        ({10: "restarting"}, 10),
        ({10: "restarting", 30: "restarting", 40: "ready"}, 70),
        ({10: "starting", 20: "ready", 60: "failed", 65: "ready", 90: "restarting"}, 75),
    ],
)
def test_the_time_without_an_engine_is_not_counted(pulses, shows):
    now = 0
    clock = ServingClock(lambda: now)
    for now in range(101):
        if now in pulses:
            clock.hear(Pulse(version=0, engine_steps=0, in_flight=0, engine=pulses[now]))
    assert clock.time() == shows
    assert clock.stands_still == (list(pulses.values())[-1:] not in ([], ["ready"]))
