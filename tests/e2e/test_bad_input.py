"""Bad input through the real command line: one clear message, nothing started, nothing lost."""

import json
import struct
import subprocess

import pytest

from runs import TRAIN, scenario

BAD_REWARD = """
calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    good = [float("7" in completion) for completion in completions]
    return good if calls < 2 else {bad}
"""
FILLING_REWARD = """
import os

calls = 0

def reward(completions, **columns):
    global calls
    calls += 1
    if calls == 3:
        file = os.open({filler!r}, os.O_WRONLY | os.O_CREAT)
        size = 1 << 16
        while size:
            try:
                os.write(file, b"x" * size)
            except OSError:
                size //= 2
        os.close(file)
    return [float("7" in completion) for completion in completions]
"""

REFUSED = {
    "an unknown key": (["grpo.learning_rat=1"], "job.toml: grpo.learning_rat", "grpo.learning_rate?"),
    "a wrong type": (["grpo.max_steps=many"], "job.toml: grpo.max_steps: expected int", "'many'"),
    "a wrong value": (["model.dtype=float8"], "job.toml: model.dtype: expected 'auto'", "'float32'"),
    "an unknown key of vLLM": (["vllm.max_num_sqs=3"], "job.toml: vllm.max_num_sqs", "vllm.max_num_seqs?"),
    "an unknown key of the server": (["server.lease=3"], "job.toml: server.lease", "server.lease_s?"),
    "a wrong type for the server": (["server.lease_s=long"], "job.toml: server.lease_s: expected float", "'long'"),
    "an unknown engine": (["server.backend=vlm"], "job.toml: server.backend: expected one of vllm, sglang", "'vllm'"),
    "a choice that training does not survive": (
        ["vllm.logprobs_mode=raw_logprobs"],
        "job.toml: vllm.logprobs_mode: expected 'processed_logprobs'",
        "Leave vllm.logprobs_mode out",
    ),
    "a missing column": (["data.source={questions}"], "data.prompt_column: there is no column 'prompt'", "question"),
    "an empty dataset": (["data.source={empty}"], "empty.jsonl: holds no examples", "data.source"),
    "a missing file": (["data.source={folder}/questoins.jsonl"], "there is no such file", "questions.jsonl?"),
    "a dataset that the hub does not give": (["data.source=nobody/nothing"], "data.source 'nobody/nothing'", "network"),
    "a reward module that does not exist": (
        ["rewards.0.function=no_such_module:f"],
        "rewards.0.function: no_such_module cannot be imported",
        ".venvs/trainer",
    ),
    "a reward function that does not exist": (["rewards.0.function=math:flor"], "math has no function", "math:floor?"),
    "a model folder that does not exist": (["model.name=/nowhere/model"], "/nowhere/model", "Check the path"),
    "a model that the hub does not give": (["model.name=nobody/nothing"], "'nobody/nothing'", "Check the name"),
    "a completion longer than the context": (
        ["grpo.max_completion_length=200"],
        "job.toml: grpo.max_completion_length: expected less than model.max_seq_length (128)",
        "got 200",
    ),
}
"""What is set; what the message says of the place and the cause; what it advises."""


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_before_anything_starts(lab, tmp_path, what):
    overrides, problem, remedy = REFUSED[what]
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    places = {
        "folder": tmp_path,
        "questions": tmp_path / "questions.jsonl",
        "empty": tmp_path / "empty.jsonl",
    }
    run = lab.fake(*(override.format(**places) for override in overrides)).finish()
    assert run.code == 2, run.report()
    assert problem in run.stderr
    assert remedy in run.stderr
    assert run.stderr.count("tandem-train: ") == 1
    assert "Traceback" not in run.stderr
    assert not run.output_dir.exists()
    assert list(run.cwd.iterdir()) == []
    assert run.journal("start") == []


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(lab, tmp_path):
    run = lab.fake(TANDEM_VENVS=str(tmp_path)).finish()
    assert run.code == 2
    assert f"{tmp_path}/server-vllm has no tandem-server" in run.stderr
    assert "bash scripts/setup_envs.sh --only server-vllm" in run.stderr
    assert not run.output_dir.exists()


@scenario
def one_step(lab):
    """A whole run of one step, whose folder then is in the way."""
    return lab.fake("grpo.max_steps=1").finish()


def test_a_folder_that_holds_a_run_is_left_as_it_is(lab, one_step):
    before = (one_step.output_dir / "run" / "metrics.jsonl").read_bytes()
    run = lab.fake(output_dir=one_step.output_dir).finish()
    assert run.code == 2
    assert "already holds a run" in run.stderr
    assert f"--resume run --set output_dir={run.output_dir}" in run.stderr
    assert (one_step.output_dir / "run" / "metrics.jsonl").read_bytes() == before
    assert (one_step.output_dir / "run" / "summary.json").exists()


def test_a_run_without_a_checkpoint_cannot_be_resumed(lab, one_step, tmp_path):
    (tmp_path / "run").mkdir()
    config = (one_step.output_dir / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(config)
    run = lab.start(*TRAIN, "--resume", "run", "--set", f"output_dir={tmp_path}", output_dir=tmp_path).finish()
    assert run.code == 2
    assert f"There is no whole checkpoint in {tmp_path}/run/checkpoints" in run.stderr
    assert "grpo.save_steps" in run.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]


def test_a_run_that_does_not_exist_cannot_be_resumed(lab, one_step):
    run = lab.start(*TRAIN, "--resume", "nun", "--set", f"output_dir={one_step.output_dir}").finish()
    assert run.code == 2
    assert "there is no run 'nun'" in run.stderr
    assert "there are: run" in run.stderr


@scenario
def reward_raises(lab):
    return lab.fake("grpo.save_steps=1", reward=BAD_REWARD.format(bad="[1 / len([]) for _ in completions]")).finish()


@scenario
def reward_returns_nan(lab):
    return lab.fake("grpo.save_steps=1", reward=BAD_REWARD.format(bad='[*good[:-1], float("nan")]')).finish()


@scenario
def reward_returns_too_few(lab):
    return lab.fake("grpo.save_steps=1", reward=BAD_REWARD.format(bad="good[1:]")).finish()


@scenario
def reward_returns_text(lab):
    return lab.fake("grpo.save_steps=1", reward=BAD_REWARD.format(bad='["good"] * len(good)')).finish()


@scenario
def prompt_too_long(lab):
    folder = lab.folder / "prompt-too-long"
    folder.mkdir()
    rows = [{"prompt": f"What is {n}?", "answer": "7"} for n in range(8)]
    rows[5]["prompt"] = "Why? " * 40
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lab.fake(f"data.source={folder}/data.jsonl").finish()


WRONG_REWARDS = {
    "reward_raises": "raised ZeroDivisionError: division by zero",
    "reward_returns_nan": "returned nan instead of a finite number",
    "reward_returns_too_few": "returned 3 numbers for 4 completions",
    "reward_returns_text": "returned 'good' instead of a finite number",
}
NAMED_WITH_ITS_SAMPLE = ["reward_raises", "reward_returns_nan", "reward_returns_text"]


@pytest.mark.parametrize(("run", "said"), WRONG_REWARDS.items(), indirect=["run"])
def test_a_wrong_reward_is_named_and_costs_one_step(run, said):
    assert run.code == 1, run.report()
    assert "my_reward.py:reward' " + said in run.stderr
    assert "Traceback" not in run.stderr
    assert run.steps == [1]
    assert run.checkpoints == ["checkpoint-1"]
    assert run.left == {}


@pytest.mark.parametrize("run", NAMED_WITH_ITS_SAMPLE, indirect=True)
def test_a_wrong_reward_is_named_with_its_sample(run):
    assert "prompt: 'What is " in run.stderr
    assert "completion: '" in run.stderr


def test_a_prompt_that_does_not_fit_is_quoted_before_an_engine_starts(prompt_too_long):
    run = prompt_too_long
    assert run.code == 2, run.report()
    assert "A prompt of 200 tokens and a completion of up to 4 do not fit the context of 128 tokens" in run.stderr
    assert "'Why? Why? " in run.stderr
    assert "model.max_seq_length" in run.stderr
    assert run.journal("start") == []
    assert run.left == {}


@scenario
def disk_full(lab):
    """The disk fills up in the third step; then there is room again."""
    disk = lab.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=False)
    if mounted.returncode:
        return None
    filler = disk / "filler"
    try:
        run = lab.fake(
            *("grpo.max_steps=4", "grpo.save_steps=1", f"output_dir={disk}/runs"),
            reward=FILLING_REWARD.format(filler=str(filler)),
        )
        run.output_dir = disk / "runs"
        run.finish()
        filler.unlink(missing_ok=True)
        run.resumed = lab.resume(run).finish()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)
    return run


def test_a_full_disk_is_named(disk_full):
    if disk_full is None:
        pytest.skip("mounting a small disk takes root")
    assert disk_full.code == 1, disk_full.report()
    assert "No space left on device" in disk_full.stderr or "is full" in disk_full.stderr
    assert "--resume" in disk_full.stderr
    assert "Traceback" not in disk_full.stderr
    assert disk_full.left == {}


def test_a_full_disk_leaves_the_last_adapter_whole(disk_full):
    if disk_full is None:
        pytest.skip("mounting a small disk takes root")
    assert_is_safetensors(disk_full.run_dir / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors")


def test_a_run_goes_on_when_there_is_room_again(disk_full):
    if disk_full is None:
        pytest.skip("mounting a small disk takes root")
    resumed = disk_full.resumed
    assert resumed.code == 0, resumed.report()
    assert resumed.steps == [1, 2, 3, 4]


def assert_is_safetensors(path):
    """Its header reads, and all the bytes that it tells of are there."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    assert len(data) == 8 + length + end
