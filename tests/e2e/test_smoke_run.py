"""One whole run with the real engine: all that a run promises to leave, and an adapter that plain PEFT loads."""

import json
import stat
import subprocess
from pathlib import Path

import pytest

from runs import PATIENCE_S, ROOT, TRAIN, TRAINER_PYTHON, read_toml, scenario

STEPS = 4
FIELDS = [
    *("step", "version", "staleness", "reward_mean", "reward_std", "loss", "learning_rate", "ratio_mean"),
    *("dlogp_mean_abs", "grad_norm", "completion_length", "rollout_s", "train_s", "publish_ms", "load_ms", "proof"),
    *("proof_ms", "overlap", "sleep_s", "wake_s", "freed_bytes", "generated_tokens", "generated_tokens_per_s"),
    "wall_s",
]
SUMMARY_FIELDS = [
    *("backend", "placement", "steps", "reward_first4", "reward_last4", "eval_before", "eval_after", "wall_s"),
    *("adapter", "restarts", "best_step", "best_reward", "stopped_early", "proof"),
]
OPTIONAL = {"overlap", "sleep_s", "wake_s", "freed_bytes"}
"""Null on a CPU."""


@scenario
def smoke(lab):
    """Weights eight times as large as usual and a high learning rate: a few steps change what is answered."""
    output_dir = lab.folder / ("deep-" * 30) / "runs"  # Far longer than a socket's path may be.
    run = lab.start(
        *(*TRAIN, "--config", str(ROOT / "configs" / "smoke.toml"), "--run", "run", "--steps", str(STEPS)),
        *("--set", f"output_dir={output_dir}"),
        *("--set", "model.name=builtin:tiny-random-llama?scale=8"),
        *("--set", "grpo.learning_rate=1e-2"),
        *("--set", "grpo.lr_scheduler_type=constant"),
        *("--set", "server.cpu_kv_gib=1"),
        output_dir=output_dir,
    )
    connection = run.run_dir / "connection.json"
    run.until(connection.exists, "the server listens")
    run.modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (connection, run.run_dir)}
    run.addresses = json.loads(connection.read_text())
    run.modes["sockets"] = stat.S_IMODE(Path(run.addresses["data"].removeprefix("ipc://")).parent.stat().st_mode)
    run.words = run.living()
    return run.finish()


@pytest.fixture(scope="module")
def plain_peft(smoke, tmp_path_factory):
    """What plain PEFT answers to the held-out prompts, without and with the trained adapter."""
    questions = tmp_path_factory.mktemp("peft") / "questions.json"
    settings = read_toml(smoke.run_dir / "server.toml")
    asked = {
        "model": settings["server"]["model"],
        "adapter": str(smoke.run_dir / "adapter"),
        "prompts": [sample["prompt"] for sample in phase(smoke, "eval_after")],
        "max_new_tokens": read_toml(smoke.run_dir / "config.toml")["grpo"]["max_completion_length"],
    }
    questions.write_text(json.dumps(asked))
    done = subprocess.run(
        [TRAINER_PYTHON, Path(__file__).with_name("peft_greedy.py"), questions],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def phase(run, name):
    return [sample for sample in run.samples if sample["phase"] == name]


def test_it_ends_well_and_whole(smoke):
    assert smoke.code == 0, smoke.report()
    assert smoke.left == {}


def test_every_step_has_exactly_the_promised_figures(smoke):
    assert [list(step) for step in smoke.metrics] == [FIELDS] * STEPS
    for step in smoke.metrics:
        assert {name for name, value in step.items() if value is None} <= OPTIONAL


def test_the_version_rises_by_one_a_step(smoke):
    assert smoke.steps == [1, 2, 3, 4]
    assert [step["version"] for step in smoke.metrics] == [1, 2, 3, 4]
    assert [step["staleness"] for step in smoke.metrics] == [0, 0, 0, 0]


def test_trainer_and_server_compute_the_same_policy(smoke):
    assert 0.95 <= smoke.metrics[0]["ratio_mean"] <= 1.05
    assert all(step["dlogp_mean_abs"] < 1e-3 for step in smoke.metrics)
    assert [step["proof"] for step in smoke.metrics] == ["agrees"] * STEPS
    assert smoke.summary["proof"] == {"agrees": STEPS}


def test_a_publish_is_timed(smoke):
    assert all(step["publish_ms"] >= step["load_ms"] > 0 for step in smoke.metrics)


def test_the_summary_has_the_promised_fields(smoke):
    summary = smoke.summary
    assert list(summary) == SUMMARY_FIELDS
    assert (summary["backend"], summary["placement"], summary["steps"], summary["restarts"]) == (
        "vllm",
        "cpu",
        STEPS,
        0,
    )
    rewards = [step["reward_mean"] for step in smoke.metrics]
    assert summary["reward_first4"] == pytest.approx(sum(rewards) / STEPS)
    assert Path(summary["adapter"]).name == "adapter"
    assert [summary["eval_before"], summary["eval_after"]] == [item["reward_mean"] for item in smoke.evaluations]


def test_the_resolved_config_is_that_of_the_run(smoke):
    config = read_toml(smoke.run_dir / "config.toml")
    assert config["run"] == "run"
    assert config["grpo"]["max_steps"] == STEPS
    assert config["grpo"]["epsilon"] == 0.2


def test_the_resolved_config_loads_again(smoke, lab):
    words = ("--config", str(smoke.run_dir / "config.toml"), "--run", "again", "--check")
    check = lab.start(*TRAIN, *words).finish()
    assert check.code == 0, check.report()
    assert "--max-lora-rank 8" in check.stdout


def test_the_plan_is_kept(smoke):
    assert json.loads((smoke.run_dir / "placement.json").read_text())["mode"] == "cpu"


def test_the_reward_is_drawn(smoke):
    picture = (smoke.run_dir / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.endswith(b"IEND\xaeB`\x82")


def test_samples_from_before_and_after_are_kept_and_shown(smoke):
    before, after = phase(smoke, "eval_before"), phase(smoke, "eval_after")
    assert [sample["prompt"] for sample in before] == [sample["prompt"] for sample in after]
    assert len(before) == 4
    assert {sample["version"] for sample in before} == {0}
    assert {sample["version"] for sample in after} == {STEPS}
    assert "before" in smoke.stdout
    assert before[0]["prompt"].split("?")[0] in smoke.stdout


def test_the_reader_is_told_where_everything_is(smoke):
    run_dir = smoke.output_dir / "run"
    for name in ("reward.png", "adapter", "server.log"):
        assert str(run_dir / name) in smoke.stdout


def test_the_terminal_shows_progress_and_nothing_of_the_libraries(smoke):
    assert sum(line.startswith("step ") for line in smoke.stdout.splitlines()) == STEPS
    assert smoke.stderr == ""


def test_nobody_else_could_read_along(smoke):
    assert smoke.modes == {"connection.json": 0o600, "run": 0o700, "sockets": 0o700}
    assert smoke.addresses["data"].startswith("ipc:///")


def test_only_the_two_halves_ran(smoke):
    """Each in its own environment: the trainer, tandem-server, a guard, and the engine's processes."""
    words = "\n".join(smoke.words.values())
    assert str(ROOT / ".venvs" / "trainer") in words
    assert "server-vllm" in words
    assert "api_server" in words or "vllm" in words


def test_nothing_of_it_is_published_or_in_memory_any_more(smoke):
    assert not (smoke.run_dir / "connection.json").exists()
    assert not Path(smoke.addresses["data"].removeprefix("ipc://")).parent.exists()


def test_nothing_is_left_in_the_working_directory(smoke):
    assert list(smoke.cwd.iterdir()) == []


def test_the_adapter_gives_in_plain_peft_the_tokens_that_the_server_gave(smoke, plain_peft):
    served = [sample["token_ids"] for sample in phase(smoke, "eval_after")]
    assert plain_peft["adapter"] == served


def test_the_base_model_gives_in_plain_transformers_the_tokens_that_the_server_gave(smoke, plain_peft):
    served = [sample["token_ids"] for sample in phase(smoke, "eval_before")]
    assert plain_peft["base"] == served


def test_training_has_changed_what_is_answered(plain_peft):
    assert all(base != trained for base, trained in zip(plain_peft["base"], plain_peft["adapter"], strict=True))
