"""What a Session says of its run before anything starts."""

from pathlib import Path

import pytest

from trainer_env import config
from trainer_env.placement import Placement
from trainer_env.session import Session

CONFIGS = Path(__file__).parents[2] / "configs"
OWN_DATA = ("data={source='builtin:arithmetic'}", "rewards=[{function='exact_match'}]")


@pytest.fixture(autouse=True)
def a_server_environment(tmp_path, monkeypatch):
    program = tmp_path / "server-vllm" / "bin" / "tandem-server"
    program.parent.mkdir(parents=True)
    program.touch()
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "ranks", "overrides", "said"),
    [
        ("demo", 1, (), "36 of 2 prompts x 8 completions"),
        ("qwen-7b-8gpu", 6, OWN_DATA, "300 of 24 prompts x 8 completions"),
        ("qwen-7b-8gpu", 3, OWN_DATA, "300 of 12 prompts x 8 completions"),
        (
            "demo",
            1,
            ("grpo.per_device_train_batch_size=4", "grpo.steps_per_generation=2"),
            "36 of 0.5 prompts x 8 completions",
        ),
    ],
)
def test_a_steps_prompts_are_those_of_all_trainer_processes(name, ranks, overrides, said):
    placement = Placement(mode="split" if ranks > 1 else "cpu", ranks=ranks)
    session = Session(config.load(CONFIGS / f"{name}.toml", overrides), placement)
    assert f"steps      {said}" in session.describe()
