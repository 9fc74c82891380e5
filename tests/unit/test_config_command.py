"""tandem-train config: what it shows, finds wrong and finds different, as text and as exit statuses."""

import sys
import tomllib
from pathlib import Path

import pytest

from bridge.errors import ConfigError
from bridge.settings import problems
from server_env.config import ServerConfig, all_words
from trainer_env import cli, config
from trainer_env.config import TrainConfig, comparing
from trainer_env.config.grpo_config import GrpoConfig
from trainer_env.config.setting_words import OTHER_HALF, demo_comments, is_known, known_keys, words
from trainer_env.devices import Device, Devices
from trainer_env.placement import plan
from trainer_env.serving.server_settings import FILLED_FROM, server_settings
from trainer_env.session import opening
from trainer_env.training import trl_settings

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo.toml"


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """tandem-train config in an empty folder: (exit status, what it printed)."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        code = cli.main(["config", *map(str, argv)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


@pytest.fixture
def server_half(monkeypatch, tmp_path):
    """A server environment, in which tandem-server is what is under test here; whether and how often it was asked."""
    program, asked = tmp_path / "venvs" / "server-vllm" / "bin" / "tandem-server", tmp_path / "asked"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexec {sys.executable} -m server_env.cli "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "venvs"))
    return lambda: asked.read_text().splitlines() if asked.exists() else []


@pytest.fixture
def no_server_half(monkeypatch, tmp_path):
    """An installation without server environments: what its check costs is not spent."""
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "none"))


def a_run(name, *overrides, output_dir="runs"):
    folder = Path(output_dir) / name
    folder.mkdir(parents=True)
    loaded = config.load(DEMO, [f'run="{name}"', f'output_dir="{output_dir}"', *overrides])
    (folder / "config.toml").write_text(config.to_toml(loaded))
    return folder


def test_what_is_shown_is_the_config_with_every_default(run, no_server_half, tmp_path):
    code, text = run("show", DEMO, "--set", "grpo.beta=0.5")
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert code == 0
    assert config.load(shown) == config.load(DEMO, ["grpo.beta=0.5"])
    assert "\nbeta = 0.5  # default: 0.0\n" in text
    assert "\nepsilon = 0.2\n" in text
    assert "\n# steps_per_generation is not set\n" in text
    shown_keys = {
        line.lstrip("# ").split(" ")[0] for line in text.splitlines() if " = " in line or "is not set" in line
    }
    assert set(GrpoConfig.__struct_fields__) - {"extra"} <= shown_keys


def test_only_what_is_changed_makes_the_same_config(run, tmp_path):
    _, text = run("show", DEMO, "--changed", "--set", 'vllm={extra_args=["--x"]}', "--set", "grpo.extra.delta=2")
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert config.load(shown) == config.load(DEMO, ['vllm={extra_args=["--x"]}', "grpo.extra.delta=2"])
    assert tomllib.loads(text)["grpo"] == {
        "per_device_train_batch_size": 16,
        "max_steps": 36,
        "learning_rate": 3e-4,
        "adam_beta2": 0.99,
        "max_completion_length": 12,
        "extra": {"delta": 2},
    }
    assert "temperature" not in text


def test_a_setting_is_looked_up_with_its_value_default_type_and_meaning(run):
    code, text = run("show", DEMO, "grpo.learning_rate")
    assert code == 0
    for part in ("grpo.learning_rate = 0.0003", "1e-05", "a number above 0", "LoRA takes 10 to 100 times"):
        assert part in text
    assert 'one of "none", "all", "lora_only"' in run("show", "lora.bias")[1]
    assert "For one batch of completions." in run("show", DEMO, "rewards.0.timeout_s")[1]
    assert "evaluation.keep_best = true" in run("show", "evaluation")[1]


def test_what_stands_in_a_free_table_is_shown_with_what_the_table_is_for(run, server_half):
    a_run("adding", "rewards.0.args.ending=0.2", "grpo.extra.delta=2.5", "server.engine_env.A='b'")
    code, text = run("show", "adding", "rewards.0.args.ending")
    assert (code, text.splitlines()[0]) == (0, "rewards.0.args.ending = 0.2  (adding)")
    assert "what the function is given besides the batch" in text
    assert run("show", "adding", "grpo.extra.delta")[1].startswith("grpo.extra.delta = 2.5  (adding)\n")
    for key in ("server.engine_env.A", "server.engine_env"):
        text = run("show", "adding", key)[1]
        assert text.startswith('server.engine_env.A = "b"  (adding)\n')
        assert "Environment variables for the engine" in text
    assert run("show", "adding", "rewards.0.args.begining")[0] == 2


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("grpo.lerning_rate", "Did you mean grpo.learning_rate?"),
        ("rewards.0.wieght", "Did you mean rewards.weight?"),
        ("zzz.zzz", "The sections are model"),
        ("vllm.max_num_sqs", "Did you mean vllm.max_num_seqs?"),
        ("server.memroy_share", "Did you mean server.memory_share?"),
        ("evalution", "grpo.learning_rate"),
    ],
)
def test_a_setting_that_is_none_names_the_nearest(run, server_half, wrong, near):
    code, text = run("show", wrong)
    assert code == 2
    assert near in text


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("server.startup_timeout_s", ("= 900.0  (default)", "default  900.0", "a number above 0", "one start of the")),
        ("server.memory_share", ("comes from the placement", "of at most 1", "Part of each GPU's memory")),
        ("server.max_lora_rank", ("= 8  (from lora.r)", "default  16", "a whole number of at least 1")),
        ("server.backend", ('= "vllm"  (', "nothing else in this file changes with it", 'one of "vllm", "sglang"')),
        ("server.adapter_slots", ("server.adapter_slots is not set", "max_staleness + 2")),
        ("vllm.max_num_seqs", ("vllm.max_num_seqs is not set", "Left out: server.max_sequences.")),
        ("sglang.extra_args", ("sglang.extra_args = []  (default)", "SGLang's command line")),
    ],
)
def test_the_server_half_is_asked_what_its_settings_mean(run, server_half, key, parts):
    code, text = run("show", DEMO, key)
    assert code == 0
    assert server_half() == ["--settings"]
    for part in parts:
        assert part in " ".join(text.split("\n         ")), text


def test_a_section_of_the_server_half_is_listed_whole(run, server_half):
    code, text = run("show", DEMO, "server", "--set", "server.engine_env.A=b", "--set", "server.lease_s=30")
    lines = text.splitlines()
    assert code == 0
    assert [line.split(" ")[0] for line in lines if line.startswith("server.")] == [
        f"server.{name}" if name != "engine_env" else "server.engine_env.A" for name in ServerConfig.__struct_fields__
    ]
    assert f"server.lease_s = 30  ({DEMO})" in lines
    assert "server.stall_timeout_s comes from rollout.timeout_s, a third of it, at least server.load_timeout_s" in lines
    assert "server.load_timeout_s = 120.0  (default)" in lines


def test_the_whole_config_says_what_is_left_out_of_the_server_halfs_tables_and_stays_the_same(
    run, server_half, tmp_path
):
    code, text = run("show", DEMO, "--set", "server.lease_s=30")
    assert code == 0
    for line in ("lease_s = 30  # set here", "# load_timeout_s = 120.0  (default)", "# max_num_seqs is not set"):
        assert f"\n{line}\n" in text
    assert "mem_fraction_static" not in text  # Of an engine that is not asked.
    shown = tmp_path / "shown.toml"
    shown.write_text(text)
    assert config.load(shown) == config.load(DEMO, ["server.lease_s=30"])


def test_only_what_is_the_server_halfs_is_asked_of_it(run, server_half):
    run("show", DEMO, "grpo.learning_rate")
    run("show", DEMO, "evaluation")
    run("show", DEMO, "--changed")
    assert server_half() == []


def test_without_a_server_environment_it_is_said_that_nobody_can_be_asked(run, no_server_half):
    missing = "The environment of the vllm server is missing"
    code, text = run("show", DEMO)
    assert code == 0
    assert missing in text.splitlines()[-1]
    assert tomllib.loads(text)["server"] == {"backend": "vllm"}
    code, text = run("show", DEMO, "server.backend")
    assert code == 0
    assert text.startswith(f'server.backend = "vllm"  ({DEMO})\n')
    assert missing in text
    assert missing in run("show", DEMO, "server")[1]
    code, text = run("show", DEMO, "server.memory_share")
    assert code == 2
    assert missing in text
    assert "--only server-vllm" in text


def test_the_other_engines_environment_knows_as_much(run, server_half):
    assert run("show", DEMO, "vllm.max_num_seqs", "--set", "server.backend=sglang")[0] == 0
    assert server_half() == ["--settings"]


@pytest.mark.parametrize("answer", ["echo 'no such option' >&2; exit 2", "echo '['", "echo '[{}]'"])
def test_a_server_half_that_does_not_answer_is_no_mystery(run, server_half, tmp_path, answer):
    (tmp_path / "venvs" / "server-vllm" / "bin" / "tandem-server").write_text(f"#!/bin/sh\n{answer}\n")
    code, text = run("show", DEMO, "server.memory_share")
    assert code == 2
    assert "The server half does not say what its settings mean" in text
    assert "scripts/setup_envs.sh" in text
    assert ("no such option" in text) == ("no such option" in answer)


def test_every_setting_of_the_server_half_has_words():
    for told in all_words():
        assert told.meaning, told.key
        assert told.section, told.key
        assert "a value" not in told.takes, told.key
    assert {told.key for told in all_words() if "." not in told.key} == set(OTHER_HALF)


def test_what_is_said_to_be_filled_in_is_what_is_filled_in():
    one = Device(id="0", total_bytes=80 << 30, free_bytes=80 << 30)
    placement = plan(config.load(DEMO).placement, Devices(gpus=(one,)))
    filled = server_settings(config.load(DEMO, ["server={}"]), "model", placement)["server"]
    assert FILLED_FROM.keys() == {f"server.{name}" for name in filled}
    assert all(is_known(source) for source in FILLED_FROM.values() if " " not in source)


def test_a_run_is_found_by_its_name_and_by_its_folder(run):
    a_run("adding", "grpo.max_steps=7")
    for name in ("adding", "runs/adding", "runs/adding/config.toml"):
        assert "grpo.max_steps = 7" in run("show", name, "grpo.max_steps")[1]
    a_run("elsewhere", output_dir="others")
    assert run("show", "elsewhere", "--output-dir", "others")[0] == 0
    code, text = run("show", "runs/addin")
    assert code == 2
    assert "Did you mean adding?" in text


def test_every_setting_has_words():
    for key in known_keys():
        told = words(key, DEMO)
        assert told.takes
        assert "a value" not in told.takes
        assert told.section
        assert told.meaning or "a table of" in told.takes, key  # Of a section its table says it.
    with pytest.raises(ConfigError):
        words("no.such", DEMO)


def test_comments_are_read_where_people_write_them():
    text = """
# Above everything.

a = 1   # behind "a"
[one]   # a heading
# Above b,
# on two lines.
b = "x # no comment"  # and behind.
      # It goes on.
plain = 3
# off = 0   # what it would do
[[two]]
c = ['#']
"""
    assert demo_comments(text) == {
        "a": 'behind "a"',
        "one.b": "Above b, on two lines. and behind. It goes on.",
        "one.off": "what it would do",
    }


def test_a_good_config_is_one_line(run, no_server_half):
    code, text = run("check", DEMO, CONFIGS / "smoke.toml", "--load")
    assert code == 0
    assert [line.partition(";")[0] for line in text.splitlines()] == [f"{DEMO}: good", f"{CONFIGS}/smoke.toml: good"]
    assert "not checked: the server half: The environment of the vllm server is missing" in text


def test_everything_that_is_wrong_is_said(run, no_server_half, tmp_path):
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("""
        color = "red"
        [model]
        nam = "x"
        [[rewards]]
        function = "length"
        wieght = 1
        [grpo]
        beta = -1
        max_steps = "many"
        [tracking]
        report_to = ["wanb"]
    """)
    code, text = run("check", wrong, DEMO)
    assert code == 2
    for part in (
        "color: there is no such key",
        "Did you mean model.name?",
        "model.name: is missing",
        "Did you mean rewards[0].weight?",
        "grpo.beta: expected float >= 0.0, got -1",
        "grpo.max_steps: expected int, got str ('many')",
        "nearest valid value is 'wandb'",
        f"{DEMO}: good",
    ):
        assert part in text
    assert text.count(f"{wrong}: ") == 7


def test_what_does_not_go_together_does_not_exist_or_is_not_installed_is_said(run, no_server_half, tmp_path):
    _, text = run("check", DEMO, "--set", "grpo.top_p=0.5", "--set", "lora.use_dora=true")
    assert text.count(f"{DEMO}: ") == 3  # The third says that the server half was not asked.
    code, text = run("check", DEMO, "--load", "--set", "data.source=none.jsonl", "--set", "rewards.0.function=lenth")
    assert code == 2
    assert "none.jsonl" in text
    assert "Did you mean 'length'?" in text
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "answer": "two"}\n')
    code, text = run("check", DEMO, "--load", "--set", f"data.source={rows}", "--set", "data.eval_size=0")
    assert code == 2
    assert "rewards.0.function: integer_answer: the answer is no integer: 'two', for example 1" in text
    code, text = run("check", DEMO, "--set", "tracking.report_to=['swanlab', 'comet_ml']")
    assert code == 2
    assert "bin/python swanlab comet-ml" in text
    assert run("check", "demi.toml")[0] == 2


def test_the_server_half_is_asked_where_it_is_installed(run, tmp_path, monkeypatch):
    program = tmp_path / "venvs" / "server-vllm" / "bin" / "tandem-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'it does not like this' >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "venvs"))
    code, text = run("check", DEMO)
    assert code == 2
    assert "The server half refuses this configuration" in text
    assert "it does not like this" in text
    program.write_text("#!/bin/sh\necho vllm serve\n")
    assert run("check", DEMO) == (0, f"{DEMO}: good\n")


def test_a_machine_that_cannot_run_a_config_does_not_make_it_wrong(run, tmp_path, monkeypatch):
    program = tmp_path / "venvs" / "server-vllm" / "bin" / "tandem-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "venvs"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, text = run("check", DEMO, "--set", "placement.mode=split")
    assert code == 0
    assert "not checked: the server half, since this machine cannot run it" in text


def test_processes_that_this_machine_has_no_gpus_for_are_said(run, tmp_path, monkeypatch):
    """On a CPU two processes make a whole group; here are GPUs, and one of them trains."""
    program = tmp_path / "venvs" / "server-vllm" / "bin" / "tandem-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "venvs"))
    gpus = tuple(Device(id=str(index), total_bytes=80 << 30, free_bytes=80 << 30) for index in range(2))
    monkeypatch.setattr(opening, "detect", lambda: Devices(gpus=gpus, cores=8))
    code, text = run("check", DEMO, "--set", "placement.trainer_ranks=2", "--set", "grpo.per_device_train_batch_size=4")
    assert code == 0
    assert "this machine cannot run it" in text
    assert "placement.trainer_ranks: 2 processes are asked for, and one trains on each" in text


def test_an_extra_setting_that_tandem_needs_as_it_is_is_refused(run, no_server_half):
    for key in set(trl_settings.owned(config.load(DEMO))) - set(GrpoConfig.__struct_fields__):
        code, text = run("check", DEMO, "--set", f"grpo.extra.{key}=5")
        assert code == 2
        assert f"grpo.extra.{key}: cannot be set here: " in text
    assert run("check", DEMO, "--set", "grpo.extra.delta=2.5")[0] == 0


def test_configs_that_differ_are_a_table_and_the_same_ones_nothing(run):
    a_run("one", "grpo.max_steps=7", "rollout.max_staleness=1")
    a_run("two", "grpo.max_steps=8", "server.data_parallel=2")
    assert run("diff", "one", "runs/one") == (0, "")
    code, text = run("diff", "one", "two")
    assert code == 1
    assert [line.split() for line in text.splitlines()] == [
        ["key", "one", "two"],
        ["grpo.max_steps", "7", "8"],
        ["rollout.max_staleness", "1", "not", "set"],
        ["server.data_parallel", "not", "set", "2"],
    ]
    code, text = run("diff", "one", "one", "--all")
    assert code == 0
    assert len(text.splitlines()) > 80


def test_a_default_that_is_written_out_is_no_difference(run, tmp_path):
    short, long = tmp_path / "short.toml", tmp_path / "long.toml"
    short.write_text('[model]\nname = "m"\n[[rewards]]\nfunction = "length"\n')
    long.write_text(comparing.show(config.load(short)))
    assert run("diff", short, long) == (0, "")


def test_a_wrong_value_hides_no_other_one_however_deep():
    found = problems({"rewards": 5, "model": {"name": 3}, "grpo": {"a": 1, "b": 2}}, TrainConfig, "x")
    assert [error.what.split(":")[1].strip() for error in found] == ["rewards", "model.name", "grpo.a", "grpo.b"]
    assert problems({"rewards": [{"function": "x"}], "model": {"name": "m"}}, TrainConfig, "x") == []
