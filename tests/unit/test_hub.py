"""The Hugging Face libraries are told to send no statistics, and without a network to try nothing."""

import os
import socket
from pathlib import Path

import pytest

from bridge.errors import ConfigError
from trainer_env import cli, config
from trainer_env.models.hub import go_offline_unless_reachable
from trainer_env.placement import Placement
from trainer_env.session import Session


@pytest.fixture
def listener():
    with socket.socket() as it:
        it.bind(("127.0.0.1", 0))
        it.listen()
        yield it


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def endpoint(monkeypatch, listener):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_hub_that_answers_is_asked(monkeypatch, listener):
    endpoint(monkeypatch, listener)
    assert go_offline_unless_reachable() == ""
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_a_hub_that_nobody_reaches_is_not_asked(monkeypatch, listener):
    endpoint(monkeypatch, listener)
    listener.close()
    assert "127.0.0.1 cannot be reached: Connection refused" in go_offline_unless_reachable()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize("variable", ["http_proxy", "all_proxy", "ALL_PROXY"])
def test_a_proxy_is_left_to_find_the_hub(monkeypatch, listener, variable):
    endpoint(monkeypatch, listener)
    listener.close()
    monkeypatch.setenv(variable, "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "")
    assert go_offline_unless_reachable() == ""
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_who_is_offline_on_purpose_is_told_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in go_offline_unless_reachable()


def a_command():
    assert cli.main(["config", "show", "seed"]) == 0


def a_session():
    demo = Path(__file__).parents[2] / "configs" / "demo.toml"
    with pytest.raises(ConfigError):
        Session(config.load(demo, ["data.source=none.jsonl"]), Placement(mode="cpu"))


@pytest.mark.parametrize("start", [a_command, a_session])
def test_no_statistics_are_sent_unless_somebody_wants_to(monkeypatch, start):
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "0")
    start()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "0"
    del os.environ["HF_HUB_DISABLE_TELEMETRY"]
    start()
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"
