"""A run as data: the shipped configs load, and whatever is wrong is refused by file, key and expectation."""

import itertools
import tomllib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.errors import ConfigError
from trainer_env import config
from trainer_env.config import TrainConfig
from trainer_env.config.rules import require_whole_groups
from trainer_env.config.toml_writer import write_toml

CONFIGS = Path(__file__).parents[2] / "configs"
DEMO = CONFIGS / "demo.toml"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        config.load(DEMO, overrides)
    assert str(refused.value).startswith(f"{DEMO}: ")
    return str(refused.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_a_shipped_config_loads(path):
    assert isinstance(config.load(path), TrainConfig)


def test_groups_must_come_out_whole_for_as_many_processes_as_train():
    loaded = config.load(DEMO, ["grpo.per_device_train_batch_size=4", "placement.trainer_ranks=2"])
    require_whole_groups(loaded, 4, "x.toml")
    with pytest.raises(ConfigError, match=r"x.toml: grpo.per_device_train_batch_size: .* x 3 \(trainer devices\)"):
        require_whole_groups(loaded, 3, "x.toml")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.name)
def test_the_resolved_config_loads_as_an_equal_one(path, tmp_path):
    resolved = tmp_path / "config.toml"
    loaded = config.load(
        path, ["grpo.extra.delta=2.5", 'vllm.extra_args=["--x", "é\\"\\n"]', "rollout.max_staleness=1"]
    )
    resolved.write_text(config.to_toml(loaded), encoding="utf-8")
    assert config.load(resolved) == loaded


def test_the_demo_explains_the_knobs_that_it_sets():
    """A comment in the line, in the one above it, or at the head of the section for those that explain themselves."""
    plain = {"weight", "before", "after", "target_modules"}
    lines = DEMO.read_text().splitlines()
    bare = {
        line.split("=")[0].strip()
        for above, line in itertools.pairwise(lines)
        if "=" in line and "#" not in line + above
    }
    assert bare - plain <= {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"}


@pytest.mark.parametrize(
    ("override", "key", "expectation", "nearest"),
    [
        ("grpo.lerning_rate=1", "grpo.lerning_rate", "no such key", "grpo.learning_rate"),
        ("grop.beta=0.1", "grop", "no such key", "grpo"),
        ("model.nam=x", "model.nam", "no such key", "model.name"),
        ("lora.alpha=8", "lora.alpha", "no such key", "lora.lora_alpha"),
        ("rewards.0.wieght=2", "wieght", "no such key", "weight"),
        ("grpo.num_generations=1", "grpo.num_generations", "int >= 2, got 1", ""),
        ("grpo.num_generations=2.5", "grpo.num_generations", "int", ""),
        ("grpo.learning_rate=fast", "grpo.learning_rate", "float", ""),
        ("grpo.learning_rate=0", "grpo.learning_rate", "> 0", ""),
        ("grpo.learning_rate=-inf", "grpo.learning_rate", "> 0", ""),
        ("grpo.epsilon=inf", "grpo.epsilon", "finite number, got inf", ""),
        ("grpo.loss_type=dpao", "grpo.loss_type", "dpao", "dapo"),
        ("grpo.lr_scheduler_type=cosin", "grpo.lr_scheduler_type", "cosin", "cosine"),
        ("model.dtype=bf16", "model.dtype", "bf16", "bfloat16"),
        ("model.dtype=16", "model.dtype", "str", "bfloat16"),
        ("data.eval_size=true", "data.eval_size", "int", ""),
        ("data.eval_size=-1", "data.eval_size", "int >= 0", ""),
        ("server.backend=vlm", "server.backend", "vllm, sglang", "vllm"),
        ("server.backend=7", "server.backend", "vllm, sglang", ""),
        ("placement.mode=splt", "placement.mode", "splt", "split"),
        ("tracking.report_to=['wanb']", "tracking.report_to", "wanb", "wandb"),
        ("lora.target_modules=q_proj", "lora.target_modules", "array", ""),
        ("rewards=[]", "rewards", "length >= 1", ""),
        ("run=a/b", "run", "a/b", ""),
        ("seed=-1", "seed", "int >= 0", ""),
    ],
)
def test_a_wrong_key_type_or_value_is_named(override, key, expectation, nearest):
    message = refusal(override)
    for part in (key, expectation, nearest):
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.top_p=0.9"], "grpo.top_p: the server reports logprobs of the full distribution"),
        (["grpo.top_k=20"], "grpo.top_k"),
        (["grpo.min_p=0.05"], "grpo.min_p"),
        (["grpo.num_generations=5"], "= 16 completions; expected a multiple of num_generations (5)"),
        (["grpo.steps_per_generation=4", "rollout.max_staleness=2"], "expected a bound of at least 3, got 2"),
        (["grpo.num_iterations=2", "rollout.max_staleness=0"], "expected a bound of at least 1, got 0"),
        (["grpo.steps_per_generation=3", "grpo.gradient_accumulation_steps=2"], "do not divide one another"),
        (["grpo.steps_per_generation=4", "grpo.save_steps=6"], "grpo.save_steps: expected a multiple of 4"),
        (["grpo.max_completion_length=128"], "less than model.max_seq_length (128)"),
        (["grpo.loss_type=luspo"], "grpo.importance_sampling_level"),
        (
            ["grpo.loss_type=vespo", "grpo.vllm_importance_sampling_mode=sequence_mask"],
            "grpo.vllm_importance_sampling_mode: loss_type 'vespo' takes",
        ),
        (["grpo.lr_scheduler_type=cosine_with_min_lr"], "needs either min_lr or min_lr_rate"),
        (["grpo.lr_scheduler_type=warmup_stable_decay"], "grpo.extra.lr_scheduler_kwargs: grpo.lr_scheduler_type"),
        (
            ["grpo.lr_scheduler_type=polynomial", "grpo.learning_rate=1e-7"],
            "grpo.learning_rate: expected more than 1e-07",
        ),
        (
            ["grpo.lr_scheduler_type=polynomial", "grpo.extra.lr_scheduler_kwargs.lr_end=1e-3"],
            "grpo.learning_rate: expected more than 0.001",
        ),
        (["grpo.extra.lr_scheduler_kwargs=3"], "grpo.extra.lr_scheduler_kwargs: expected a table, got 3"),
        (["grpo.extra.save_only_model=true"], "--resume needs the optimizer's state"),
        (["grpo.extra.ignore_data_skip=true"], "grpo.extra.ignore_data_skip: cannot be set here"),
        (["grpo.extra.auto_find_batch_size=true"], "grpo.extra.auto_find_batch_size: cannot be set here"),
        (["grpo.vllm_importance_sampling_clip_min=5.0"], "less than clip_max (3.0), got 5.0"),
        (["grpo.extra.learning_rate=1"], "grpo.extra.learning_rate: set it as grpo.learning_rate"),
        (["grpo.extra.use_vllm=true"], "grpo.extra.use_vllm: cannot be set here"),
        (["grpo.extra.reward_weights=[1.0]"], "set rewards.weight"),
        (["grpo.extra.delta=nan"], "grpo.extra.delta: expected a finite number"),
        (["lora.use_dora=true"], "lora.use_dora: neither vLLM nor SGLang"),
        (["lora.bias=all"], "lora.bias"),
        (["lora.modules_to_save=['lm_head']"], "lora.modules_to_save"),
        (["lora.target_modules=['q_proj','lm_head']"], "lora.target_modules: 'lm_head' would be trained as a whole"),
        (["lora.target_modules=['model.embed_tokens']"], "lora.target_modules: 'model.embed_tokens' would be"),
        (["lora.target_modules=['all-linear']"], "'all-linear' is no layer"),
        (["lora.init_lora_weights=false"], "lora.init_lora_weights"),
        (["model.load_in_4bit=true", "placement.mode=cpu"], "model.load_in_4bit: needs a CUDA GPU"),
        (["model.dtype=float16", "placement.accelerator=cpu"], "float16 does not train on a CPU"),
        (["data.prompt_template=What is {x"], "data.prompt_template: expected '}'"),
        (["data.prompt_template=What?"], "names no column"),
        (["data.prompt_column="], "data.prompt_column: expected the name of a column"),
        (["data.chat=false", "data.system_prompt=Think."], "data.system_prompt: has no place in a raw text prompt"),
        (["rewards.0.weight=0"], "every weight is 0"),
        (["rewards=[{function='length'}, {function='length'}]"], "two rewards are called 'length'"),
        (["evaluation.num_generations=4"], "evaluation.num_generations: 4 answers at evaluation.temperature 0 are all"),
        (["evaluation.early_stopping_patience=2"], "there are none; set evaluation.every"),
        (
            ["evaluation.early_stopping_patience=2", "evaluation.every=4", "data.eval_size=0"],
            "evaluation.early_stopping_patience: nothing is held out to evaluate on",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides, expected):
    assert expected in refusal(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.lr_scheduler_type=cosine_with_min_lr", "grpo.extra.lr_scheduler_kwargs.min_lr_rate=0.1"],
        ["grpo.lr_scheduler_type=warmup_stable_decay", "grpo.extra.lr_scheduler_kwargs={num_decay_steps=4}"],
        ["grpo.lr_scheduler_type=polynomial"],
        ["grpo.loss_type=vespo"],
        [
            *("grpo.loss_type=vespo", "grpo.vllm_importance_sampling_mode=sequence_mask"),
            "grpo.vllm_importance_sampling_correction=false",
        ],
    ],
)
def test_settings_that_go_together_are_taken(overrides):
    assert config.load(DEMO, overrides)


@pytest.fixture
def installed_trl(tmp_path, monkeypatch):
    """Source in which TRL's settings are to be found; whoever imports it fails."""
    for path, name, field in (
        ("trl/trainer/grpo_config.py", "GRPOConfig(_BaseConfig)", "delta: float | None = field(default=None)"),
        ("trl/trainer/base_config.py", "_BaseConfig(TrainingArguments)", "_own: int = 1; logging_steps: float = 10"),
        ("transformers/training_args.py", "TrainingArguments", "lr_scheduler_kwargs: dict | str | None = None"),
    ):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"class {name}:\n    {field}\n")
        (tmp_path / path.partition("/")[0] / "__init__.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)


def test_an_extra_setting_that_the_installed_trl_does_not_have_is_refused(installed_trl):
    assert "grpo.extra.detla: TRL's GRPOConfig has no such setting (nearest: 'delta')." in refusal(
        "grpo.extra.detla=2.0"
    )
    assert "grpo.extra._own" in refusal("grpo.extra._own=2")
    extra = "grpo.extra={delta=2.0, unsloth_num_chunks=4, lr_scheduler_kwargs={}}"
    assert config.load(DEMO, [extra]).grpo.extra["delta"] == 2.0


def test_cispo_caps_the_ratio_where_trl_recommends_it():
    def clip_high(*overrides):
        return config.load(DEMO, overrides).grpo.clip_high

    assert (clip_high(), clip_high("grpo.epsilon_high=0.28")) == (0.2, 0.28)
    assert clip_high("grpo.loss_type=cispo") == 5.0
    assert clip_high("grpo.loss_type=cispo", "grpo.epsilon_high=4.0") == 4.0


def test_all_that_is_wrong_is_told_at_once():
    message = refusal("grpo.top_p=0.5", "lora.use_dora=true", "grpo.num_generations=5")
    assert message.count("demo.toml: ") == 3


def test_a_config_without_a_model_is_refused(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[[rewards]]\nfunction = "length"\n')
    with pytest.raises(ConfigError, match=r"c\.toml: model: is missing"):
        config.load(path)


def test_a_missing_file_names_the_nearest(tmp_path):
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        config.load(tmp_path / "mien.toml")


def test_groups_may_span_the_ranks_that_are_named():
    overrides = ["grpo.per_device_train_batch_size=4", "placement.trainer_gpus=[1, 2]"]
    assert config.load(DEMO, overrides).grpo.num_generations == 8


@pytest.mark.parametrize(
    ("overrides", "window", "lookahead"),
    [
        ([], 1, {"split": 1, "time-share": 0, "cpu": 0}),
        (["rollout.max_staleness=0"], 1, {"split": 0, "time-share": 0, "cpu": 0}),
        (["rollout.max_staleness=3"], 1, {"split": 3, "time-share": 0, "cpu": 3}),
        (["grpo.steps_per_generation=4"], 4, {"split": 1, "time-share": 0, "cpu": 0}),
        (["grpo.steps_per_generation=4", "rollout.max_staleness=6"], 4, {"split": 0, "time-share": 0, "cpu": 0}),
        (["grpo.steps_per_generation=4", "rollout.max_staleness=7"], 4, {"split": 1, "time-share": 0, "cpu": 1}),
        (["grpo.gradient_accumulation_steps=4", "grpo.num_iterations=2"], 2, {"split": 1, "time-share": 0, "cpu": 0}),
        (["grpo.gradient_accumulation_steps=4", "grpo.steps_per_generation=2"], 1, {"split": 1, "cpu": 0}),
    ],
)
def test_how_far_ahead_a_run_may_sample(overrides, window, lookahead):
    loaded = config.load(DEMO, overrides)
    assert loaded.grpo.window == window
    for mode, batches in lookahead.items():
        assert loaded.lookahead(mode) == batches
        assert (batches + 1) * window - 1 <= loaded.max_staleness(mode)


def test_a_run_without_a_name_gets_a_free_one(tmp_path):
    loaded = config.load(DEMO, [f'output_dir="{tmp_path}"'])
    first = config.named(loaded, DEMO)
    assert first.run.startswith("demo-")
    first.run_dir.mkdir()
    assert not config.named(loaded, DEMO).run_dir.exists()
    assert config.named(msgspec.structs.replace(loaded, run="mine"), DEMO).run == "mine"


@pytest.mark.parametrize(
    ("file", "start"),
    [
        ("my config.toml", "my-config-"),
        ("_draft.toml", "draft-"),
        ("größe.toml", "gr-e-"),
        (".toml", "toml-"),
        ("数.toml", "run-"),
    ],
)
def test_a_run_named_after_its_file_has_a_name_that_its_own_config_may_carry(tmp_path, file, start):
    named = config.named(config.load(DEMO, [f'output_dir="{tmp_path}"']), tmp_path / file)
    assert named.run.startswith(start)
    resolved = tmp_path / "config.toml"
    resolved.write_text(config.to_toml(named), encoding="utf-8")
    assert config.load(resolved) == named


TEXT = st.text("ab .=#[]{}\"'\\\n\t\x00\x7fé😀", max_size=8)
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_written_toml_reads_as_the_same_data(data):
    assert tomllib.loads(write_toml(data)) == data
