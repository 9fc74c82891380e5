"""Intents and native names become vLLM's command line, each boolean can be set both ways, and wrong flags are named."""

import msgspec
import pytest

from bridge.errors import ConfigError
from server_env.config import ServerConfig, from_dict
from server_env.options import EngineOptions, Option
from server_env.vllm import VLLMConfig, arguments, command, environment, resolve

SPECIAL = {"no_enable_chunked_prefill": "enable-chunked-prefill", "no_enable_prefix_caching": "enable-prefix-caching"}
BOOLEANS = [f.name for f in msgspec.structs.fields(VLLMConfig) if bool in getattr(f.type, "__args__", ())]


def words(server=None, native=None, device="cpu", installed=None):
    config = msgspec.convert({"model": "m", **(server or {})}, ServerConfig)
    return arguments(resolve(config, msgspec.convert(native or {}, VLLMConfig), device, installed), installed)


def value_of(flag, line):
    return line[line.index(flag) + 1]


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [True, False])
def test_every_boolean_can_be_set_both_ways(name, value):
    line = arguments(msgspec.convert({name: value}, VLLMConfig))
    positive = SPECIAL.get(name, name.replace("_", "-"))
    wanted = value is (name not in SPECIAL)
    assert line == [f"--{positive}" if wanted else f"--no-{positive}"]


def test_every_typed_option_reaches_the_command_line_under_its_own_name():
    samples = {"str": "x", "int": 3, "float": 0.5, "tuple": ("a=b", "c=d")}
    for field in msgspec.structs.fields(VLLMConfig):
        if field.name in BOOLEANS or field.name == "extra_args":
            continue
        kind = next(arg for arg in field.type.__args__ if arg is not type(None))
        sample = samples[getattr(kind, "__origin__", kind).__name__]
        expected = list(sample) if isinstance(sample, tuple) else [str(sample)]
        options = msgspec.convert({field.name: sample}, VLLMConfig)
        assert arguments(options) == [
            f"--{field.name.replace('_', '-')}",
            *expected,
        ]


@pytest.mark.parametrize(
    ("intent", "flag", "value"),
    [
        ({"seed": 7}, "--seed", "7"),
        ({"context_length": 99}, "--max-model-len", "99"),
        ({"max_sequences": 5}, "--max-num-seqs", "5"),
        ({"dtype": "float32"}, "--dtype", "float32"),
        ({"tensor_parallel": 2}, "--tensor-parallel-size", "2"),
        ({"max_staleness": 3}, "--max-loras", "5"),
        ({"max_staleness": 3}, "--max-cpu-loras", "12"),
        ({"adapters_held": 30}, "--max-cpu-loras", "30"),
        ({"tokenizer": "t"}, "--tokenizer", "t"),
    ],
)
def test_an_intent_becomes_the_engines_own_option(intent, flag, value):
    assert value_of(flag, words(intent)) == value


def test_switches_are_said_only_when_they_are_not_the_default():
    assert not {"--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"} & set(words())
    off = words({"prefix_cache": False, "chunked_prefill": False, "cuda_graphs": False})
    assert {"--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--enforce-eager"} <= set(off)


def test_memory_share_is_for_gpus_and_sleep_too():
    assert "--gpu-memory-utilization" not in words({"memory_share": 0.5})
    assert value_of("--gpu-memory-utilization", words({"memory_share": 0.5}, device="cuda")) == "0.5"
    assert "--enable-sleep-mode" in words({"sleep": True}, device="cuda")
    with pytest.raises(ConfigError, match="sleep"):
        words({"sleep": True})


def test_the_native_name_wins_over_the_intent():
    line = words({"seed": 1, "context_length": 10}, {"seed": 2, "max_model_len": 20, "block_size": 64})
    assert value_of("--seed", line) == "2"
    assert value_of("--max-model-len", line) == "20"
    assert value_of("--block-size", line) == "64"
    assert line.count("--seed") == 1


@pytest.mark.parametrize(("wanted", "given"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (257, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_one_that_vllm_takes(wanted, given):
    assert value_of("--max-lora-rank", words({"max_lora_rank": wanted})) == str(given)


def test_ranks_come_from_the_engines_own_list_where_there_is_one():
    installed = everything(Option(("--max-lora-rank",), choices=(8, 24)))
    assert value_of("--max-lora-rank", words({"max_lora_rank": 9}, installed=installed)) == "24"
    with pytest.raises(ConfigError, match="ranks up to 24"):
        words({"max_lora_rank": 25}, installed=installed)


@pytest.mark.parametrize(
    ("native", "named"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "vllm.logprobs_mode"),
        ({"enable_lora": False}, "vllm.enable_lora"),
        ({"max_loras": 2}, "vllm.max_loras"),
        ({"max_cpu_loras": 3}, "vllm.max_cpu_loras"),
    ],
)
def test_choices_that_training_would_not_survive_are_refused(native, named):
    with pytest.raises(ConfigError, match=named):
        words(native=native)


def test_extra_args_go_through_unchanged_and_last():
    assert words(native={"extra_args": ["--new-flag", "3"]})[-2:] == ["--new-flag", "3"]


def everything(*others):
    """An option list that has what the defaults need, with others in place of theirs."""
    line = [*words({"cuda_graphs": False, "prefix_cache": False}), "--headless", "--enable-sleep-mode"]
    flags = {word.replace("--no-", "--") for word in line if word.startswith("--")}
    valued = {line[i] for i in range(len(line) - 1) if not line[i + 1].startswith("--")}
    replaced = {flag for option in others for flag in option.flags}
    plain = [
        Option((flag,), takes_value=flag in valued, negatable=flag not in valued and flag != "--headless")
        for flag in sorted(flags - replaced)
    ]
    return EngineOptions("vllm", "9.9", (*plain, *others))


def test_an_option_that_this_version_lacks_is_named_with_version_and_neighbour():
    installed = everything(Option(("--kv-cache-dtype",), choices=("auto", "fp8")))
    with pytest.raises(ConfigError) as caught:
        words(native={"swap_space": 4.0}, installed=installed)
    assert "vllm.swap_space: --swap-space: vllm 9.9 has no such option" in caught.value.what
    with pytest.raises(ConfigError) as caught:
        words(native={"extra_args": ["--kv-cache-dtyp=fp8"]}, installed=installed)
    assert "vllm.extra_args: --kv-cache-dtyp" in caught.value.what
    assert caught.value.remedy == "The nearest option is --kv-cache-dtype."


def test_a_value_that_the_option_does_not_take_is_named():
    installed = everything(Option(("--kv-cache-dtype",), choices=("auto", "fp8")))
    assert words(native={"kv_cache_dtype": "fp8"}, installed=installed)
    for native in ({"kv_cache_dtype": "int3"}, {"extra_args": ["--kv_cache_dtype", "int3"]}):
        with pytest.raises(ConfigError, match="does not take 'int3'"):
            words(native=native, installed=installed)


def test_parts_of_an_option_underscores_and_negative_numbers_are_no_unknown_flags():
    installed = everything(Option(("--compilation-config", "-O")), Option(("--long-prefill",)))
    extra = ["--compilation_config.mode", "3", "-O", "{}", "--long-prefill", "-1", "--no-enforce-eager"]
    assert words(native={"extra_args": extra}, installed=installed)[-len(extra) :] == extra


def test_a_plain_switch_is_turned_off_by_leaving_it_out():
    assert "--no-headless" not in words(native={"headless": False}, installed=everything())
    assert "--headless" in words(native={"headless": True}, installed=everything())


def test_development_routes_are_open_only_where_sleep_needs_them(tmp_path):
    def variables(**server):
        config = msgspec.convert({"model": "m", "device": "cuda", **server}, ServerConfig)
        return environment(config, resolve(config, VLLMConfig(), "cuda"), "cuda", tmp_path, tmp_path)

    assert "VLLM_SERVER_DEV_MODE" not in variables()
    assert variables(sleep=True)["VLLM_SERVER_DEV_MODE"] == "1"
    assert variables(engine_env={"VLLM_CACHE_ROOT": "/mine"})["VLLM_CACHE_ROOT"] == "/mine"


def test_without_vllm_the_error_names_the_setup_command():
    with pytest.raises(ConfigError, match="no vLLM"):
        command()
    assert command(("numactl", "x")) == ["numactl", "x"]


def test_the_same_file_serves_either_backend():
    data = {"server": {"model": "m", "context_length": 64}, "vllm": {"block_size": 16}, "sglang": {"tp_size": 1}}
    for backend in ("vllm", "sglang"):
        file = from_dict({**data, "server": {**data["server"], "backend": backend}}, "test")
        assert file.server.context_length == 64
