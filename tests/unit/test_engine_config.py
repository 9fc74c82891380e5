"""What holds for the configuration of every engine: switches both ways, native names, intents, wrong flags named."""

import argparse

import msgspec
import pytest

from bridge.errors import ConfigError
from server_env.config import ServerFile, from_dict
from server_env.engines import sglang, vllm
from server_env.engines.backends import NOWHERE, make_engine
from server_env.engines.options import EngineOptions, Option

CONFIGS = {"vllm": vllm.VLLMConfig, "sglang": sglang.SGLangConfig}
ARGUMENTS = {"vllm": vllm.arguments, "sglang": sglang.arguments}
NEGATIVE = {"no_enable_chunked_prefill", "no_enable_prefix_caching"}
"""vLLM's own names for switches that are on by default."""

TABLE = {
    "sglang": """model_path tokenizer_path tokenizer_mode load_format trust_remote_code random_seed skip_tokenizer_init
        context_length mem_fraction_static max_running_requests max_total_tokens chunked_prefill_size max_prefill_tokens
        schedule_policy schedule_conservativeness cpu_offload_gb dtype kv_cache_dtype tp_size pp_size dp_size ep_size
        base_gpu_id nnodes node_rank dist_init_addr disable_cuda_graph disable_cuda_graph_padding cuda_graph_max_bs
        cuda_graph_bs enable_torch_compile torch_compile_max_bs attention_backend sampling_backend grammar_backend
        triton_attention_reduce_in_fp32 triton_attention_num_kv_splits num_continuous_decode_steps torchao_config
        disable_radix_cache enable_nccl_nvls disable_outlines_disk_cache disable_custom_all_reduce
        disable_overlap_schedule enable_mixed_chunk enable_dp_attention enable_ep_moe enable_nan_detection
        enable_p2p_check enable_memory_saver allow_auto_truncate enable_multimodal enable_lora max_lora_rank
        lora_target_modules max_loras_per_batch max_loaded_loras lora_eviction_policy lora_backend lora_paths
        enable_lora_overlap_loading log_level log_level_http log_requests log_requests_level show_time_cost
        enable_metrics decode_log_interval""",
    "vllm": """model tokenizer load_format trust_remote_code seed skip_tokenizer_init dtype max_model_len max_num_seqs
        max_num_batched_tokens block_size kv_cache_dtype gpu_memory_utilization cpu_offload_gb swap_space
        distributed_executor_backend tensor_parallel_size pipeline_parallel_size data_parallel_size nnodes node_rank
        master_addr master_port headless enforce_eager disable_sliding_window no_enable_chunked_prefill
        no_enable_prefix_caching enable_sleep_mode worker_extension_cls logprobs_mode uvicorn_log_level enable_lora
        max_lora_rank max_loras max_cpu_loras lora_modules fully_sharded_loras""",
}
"""The options that users of other trainers know, and those that hot-loading adapters needs."""

INTENTS = {
    "model": ("x", "model", "model_path"),
    "tokenizer": ("x", "tokenizer", "tokenizer_path"),
    "dtype": ("float16", "dtype", "dtype"),
    "seed": (7, "seed", "random_seed"),
    "max_sequences": (5, "max_num_seqs", "max_running_requests"),
    "tensor_parallel": (2, "tensor_parallel_size", "tp_size"),
    "max_lora_rank": (64, "max_lora_rank", "max_lora_rank"),
    "adapters_held": (30, "max_cpu_loras", "max_loaded_loras"),
}
"""Intent, a value, and its names."""

SWITCHED_OFF = {
    "prefix_cache": (["--no-enable-prefix-caching"], ["--disable-radix-cache"]),
    "chunked_prefill": (["--no-enable-chunked-prefill"], ["--chunked-prefill-size", "-1"]),
    "cuda_graphs": (["--enforce-eager"], ["--disable-cuda-graph"]),
}


def booleans(backend):
    return [f.name for f in msgspec.structs.fields(CONFIGS[backend]) if bool in getattr(f.type, "__args__", ())]


BOOLEANS = [(backend, name) for backend in CONFIGS for name in booleans(backend)]


def engine(backend, server=None, native=None, device="cpu"):
    section = {"model": "m", "engine_command": ["x"], "device": device, "backend": backend, **(server or {})}
    return make_engine(from_dict({"server": section, backend: native or {}}, "test"))


def words(backend, server=None, native=None, device="cpu"):
    return engine(backend, server, native, device).command(NOWHERE)


def value_of(flag, line):
    assert line.count(flag) == 1
    return line[line.index(flag) + 1]


def positive(name: str) -> str:
    return name.removeprefix("no_") if name in NEGATIVE else name


def flag(name):
    return "--" + name.replace("_", "-")


def options_of(parser):
    """What set-up writes down of a parser."""
    described = [
        Option(tuple(a.option_strings), a.dest, a.nargs != 0, negatable=isinstance(a, argparse.BooleanOptionalAction))
        for a in parser._actions
        if a.dest != "help"
    ]
    return EngineOptions("engine", "9.9", tuple(described))


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("backend", "name"), BOOLEANS)
def test_every_switch_of_the_config_can_be_turned_on_and_off_whatever_its_default(backend, name, wanted, default):
    """Read as the engine would read it, as a pair of flags and (off by default) as a single one."""
    plain = positive(name)
    kinds = [argparse.BooleanOptionalAction, *([] if default else ["store_true"])]
    for kind in kinds:
        parser = argparse.ArgumentParser()
        parser.add_argument(flag(plain), action=kind, default=default)
        line = ARGUMENTS[backend](msgspec.convert({name: wanted}, CONFIGS[backend]), options_of(parser))
        assert getattr(parser.parse_args(line), plain) is (wanted is (plain == name))


@pytest.mark.parametrize(("backend", "name"), BOOLEANS)
def test_a_switch_of_the_config_without_an_option_list_takes_the_form_that_its_engine_has(backend, name):
    on, off = [ARGUMENTS[backend](msgspec.convert({name: value}, CONFIGS[backend])) for value in (True, False)]
    plain = flag(positive(name))
    if name in NEGATIVE:
        assert (on, off) == ([plain.replace("--", "--no-", 1)], [plain])
    else:
        assert on == [plain]
        assert off == ([plain.replace("--", "--no-", 1)] if backend == "vllm" else [])


@pytest.mark.parametrize(
    ("backend", "name", "server"),
    [
        ("sglang", "enable_metrics", {}),
        ("sglang", "sleep_on_idle", {}),
        ("sglang", "disable_overlap_schedule", {}),
        ("sglang", "disable_radix_cache", {"prefix_cache": False}),
        ("sglang", "disable_cuda_graph", {"cuda_graphs": False}),
        ("vllm", "enforce_eager", {"cuda_graphs": False}),
        ("vllm", "trust_remote_code", {"trust_remote_code": True}),
    ],
)
def test_a_switch_that_an_intent_turns_on_is_turned_off_in_the_engines_own_config(backend, name, server):
    assert flag(name) in words(backend, server)
    assert flag(name) not in words(backend, server, {name: False})


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_config_has_every_option_of_the_table(backend):
    assert set(TABLE[backend].split()) <= set(CONFIGS[backend].__struct_fields__)


@pytest.mark.parametrize("backend", CONFIGS)
def test_every_typed_option_reaches_the_command_line_under_its_own_name(backend):
    samples = {"str": "x", "int": 3, "float": 0.5}
    for field in msgspec.structs.fields(CONFIGS[backend]):
        if field.name in booleans(backend) or field.name == "extra_args":
            continue
        kind = next(arg for arg in field.type.__args__ if arg is not type(None))
        many = getattr(kind, "__origin__", None) is tuple
        sample = samples[(kind.__args__[0] if many else kind).__name__]
        options = msgspec.convert({field.name: [sample, sample] if many else sample}, CONFIGS[backend])
        expected = [str(sample)] * (2 if many else 1)
        assert ARGUMENTS[backend](options) == [flag(field.name), *expected]


@pytest.mark.parametrize("intent", INTENTS)
@pytest.mark.parametrize("backend", CONFIGS)
def test_an_intent_becomes_the_engines_own_option_and_the_native_name_wins(backend, intent):
    value, *names = INTENTS[intent]
    name = names[list(CONFIGS).index(backend)]
    assert value_of(flag(name), words(backend, {intent: value})) == str(value)
    other = {"str": "bfloat16", "int": 128}[type(value).__name__]
    assert value_of(flag(name), words(backend, {intent: value}, {name: other})) == str(other)


@pytest.mark.parametrize("intent", SWITCHED_OFF)
@pytest.mark.parametrize("backend", CONFIGS)
def test_what_an_intent_switches_off_is_said_only_then(backend, intent):
    expected = SWITCHED_OFF[intent][list(CONFIGS).index(backend)]
    assert expected[0] not in words(backend)
    line = words(backend, {intent: False})
    at = line.index(expected[0])
    assert line[at : at + len(expected)] == expected


@pytest.mark.parametrize(
    ("backend", "share", "native", "sleep"),
    [
        ("vllm", "--gpu-memory-utilization", "0.5", "--enable-sleep-mode"),
        ("sglang", "--mem-fraction-static", "0.4", "--enable-memory-saver"),
    ],
)
def test_the_share_of_memory_and_sleep_are_for_gpus(backend, share, native, sleep):
    assert share not in words(backend, {"memory_share": 0.5})
    assert value_of(share, words(backend, {"memory_share": 0.5}, device="cuda")) == native
    assert sleep in words(backend, {"sleep": True}, device="cuda")
    with pytest.raises(ConfigError, match=r"server\.sleep"):
        words(backend, {"sleep": True})


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_version_that_is_loaded_has_room_beside_those_that_serve(backend):
    made = engine(backend, {"max_staleness": 3})
    assert (made.adapter_slots, made.adapters_held) == (5, 12)


@pytest.mark.parametrize(
    ("backend", "native"),
    [
        ("vllm", {"enable_lora": False}),
        ("vllm", {"max_loras": 2}),
        ("vllm", {"max_cpu_loras": 3}),
        ("vllm", {"logprobs_mode": "raw_logprobs"}),
        ("sglang", {"enable_lora": False}),
        ("sglang", {"max_loras_per_batch": 3}),
        ("sglang", {"max_loaded_loras": 3}),
        ("sglang", {"dp_size": 2}),
    ],
)
def test_choices_that_training_would_not_survive_are_refused_by_name(backend, native):
    with pytest.raises(ConfigError, match=rf"{backend}\.{next(iter(native))}"):
        words(backend, native=native)


@pytest.mark.parametrize("backend", CONFIGS)
def test_extra_args_go_through_unchanged_and_last(backend):
    assert words(backend, native={"extra_args": ["--new-flag", "3"]})[-2:] == ["--new-flag", "3"]


@pytest.mark.parametrize(
    ("backend", "extra"),
    [("vllm", "--uds"), ("vllm", "--port"), ("sglang", "--api-key"), ("sglang", "--config"), ("sglang", "--port=1")],
)
def test_what_is_set_anew_at_each_start_cannot_be_set_by_hand(backend, extra):
    with pytest.raises(ConfigError, match=rf"{backend}\.extra_args: {extra.partition('=')[0]} is set by Tandem"):
        words(backend, native={"extra_args": [extra, "x"]})


@pytest.mark.parametrize("backend", CONFIGS)
def test_a_native_model_name_is_enough(backend):
    name = {"vllm": "model", "sglang": "model_path"}[backend]
    file = from_dict({"server": {"backend": backend}, backend: {name: "mine"}}, "test")
    assert file.model == "mine"
    other = ({"vllm", "sglang"} - {backend}).pop()
    with pytest.raises(ConfigError, match=r"server\.model: is missing"):
        from_dict({"server": {"backend": other}, backend: {name: "mine"}}, "test")


@pytest.mark.parametrize("backend", CONFIGS)
def test_without_the_engine_the_error_names_the_setup_command(backend):
    with pytest.raises(ConfigError, match="This environment has no") as caught:
        words(backend, {"engine_command": []})
    assert caught.value.remedy == f"bash scripts/setup_envs.sh --only server-{backend}"


@pytest.mark.parametrize("backend", CONFIGS)
def test_a_misspelt_key_of_the_engines_config_is_an_error_with_the_nearest_name(backend):
    with pytest.raises(ConfigError, match=rf"{backend}\.max_lora_rnk") as caught:
        from_dict({"server": {"model": "m"}, backend: {"max_lora_rnk": 8}}, "test")
    assert "max_lora_rank" in str(caught.value)


def test_the_same_file_serves_either_backend():
    data = {"server": {"model": "m", "context_length": 64}, "vllm": {"block_size": 16}, "sglang": {"tp_size": 1}}
    for backend in CONFIGS:
        file = from_dict({**data, "server": {**data["server"], "backend": backend}}, "test")
        assert isinstance(file, ServerFile)
        assert file.server.context_length == 64


NODES = {"nnodes": 2, "tensor_parallel": 4, "dist_init_addr": "10.0.0.1:29500", "spool_dir": "/shared"}
MEETING = {
    "vllm": ["--master-addr", "10.0.0.1", "--master-port", "29500"],
    "sglang": ["--dist-init-addr", "10.0.0.1:29500"],
}


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_of_an_engine_is_told_its_rank_and_where_to_meet(backend, rank):
    made = engine(backend, {**NODES, "node_rank": rank})
    line = made.command(NOWHERE)
    assert (value_of("--nnodes", line), value_of("--node-rank", line)) == ("2", str(rank))
    for name, value in zip(MEETING[backend][::2], MEETING[backend][1::2], strict=True):
        assert value_of(name, line) == value
    assert ("--headless" in line) is (backend == "vllm" and rank == 1)
    assert (made.node_rank, made.gpus) == (rank, 4)


@pytest.mark.parametrize("backend", CONFIGS)
def test_a_single_node_is_told_nothing_of_others(backend):
    assert not {"--nnodes", "--node-rank", "--headless", *MEETING[backend][::2]} & set(words(backend))


def test_a_version_of_vllm_without_headless_nodes_is_not_asked_for_one():
    options = EngineOptions("vllm", "0.1", ())
    server = from_dict({"server": {"model": "m", **NODES, "node_rank": 1}}, "test").server
    assert vllm.resolve(server, vllm.VLLMConfig(), "cuda", options).headless is None
    assert vllm.resolve(server, vllm.VLLMConfig(), "cuda").headless is True


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_engines_own_names_for_nodes_win(backend):
    native = {
        "nnodes": 2,
        "node_rank": 1,
        **{"vllm": {"master_addr": "h"}, "sglang": {"dist_init_addr": "h:1"}}[backend],
    }
    assert engine(backend, {"tensor_parallel": 2, "spool_dir": "/shared"}, native).node_rank == 1


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"node_rank": 2}, "there is no node 2 of 2"),
        ({"nnodes": 1, "node_rank": 1}, "there is no node 1 of 1"),
        ({"dist_init_addr": ""}, "is missing, and 2 nodes have to meet"),
        ({"dist_init_addr": "10.0.0.1"}, "expected host:port, got '10.0.0.1'"),
        ({"data_parallel": 2}, r"server\.data_parallel"),
        ({"tensor_parallel": 3}, "do not spread evenly over 2 nodes"),
        ({"spool_dir": ""}, r"server\.spool_dir: is missing"),
    ],
)
def test_nodes_that_cannot_meet_are_refused_by_name(backend, change, named):
    with pytest.raises(ConfigError, match=named):
        words(backend, {**NODES, **change})


@pytest.mark.parametrize("backend", CONFIGS)
def test_two_ranks_for_one_node_are_refused(backend):
    with pytest.raises(ConfigError, match=rf"{backend}\.node_rank: says 0, and .* says 1"):
        words(backend, {**NODES, "node_rank": 1}, {"node_rank": 0})
