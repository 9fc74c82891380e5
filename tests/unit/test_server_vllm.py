"""vLLM's own: the ranks that it takes, its option list, the routes that sleep needs; see test_engine_config.py too."""

import asyncio

import msgspec
import pytest

from bridge.errors import ConfigError
from server_env.config import ServerConfig
from server_env.engines.options import EngineOptions, Option
from server_env.engines.vllm import VLLMConfig, arguments, environment, resolve
from server_env.engines.vllm_http import VLLM


def words(server=None, native=None, device="cpu", installed=None):
    config = msgspec.convert({"model": "m", **(server or {})}, ServerConfig)
    return arguments(resolve(config, msgspec.convert(native or {}, VLLMConfig), device, installed), installed)


def value_of(flag, line):
    return line[line.index(flag) + 1]


@pytest.mark.parametrize(("wanted", "given"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (257, 320), (512, 512)])
def test_a_rank_is_rounded_up_to_one_that_vllm_takes(wanted, given):
    assert value_of("--max-lora-rank", words({"max_lora_rank": wanted})) == str(given)


def test_ranks_come_from_the_engines_own_list_where_there_is_one():
    installed = everything(Option(("--max-lora-rank",), choices=(8, 24)))
    assert value_of("--max-lora-rank", words({"max_lora_rank": 9}, installed=installed)) == "24"
    with pytest.raises(ConfigError, match="ranks up to 24"):
        words({"max_lora_rank": 25}, installed=installed)


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


async def meet(engine, body, other):
    """Whether a second request of people's is let in while the first one is there."""
    met = asyncio.Event()

    async def come():
        async with engine.people(other):
            met.set()

    async with engine.people(body):
        second = asyncio.create_task(come())
        await asyncio.sleep(0)
        found = met.is_set()
    await second
    return found


@pytest.mark.parametrize(
    "scoring",
    [
        b'{"prompt_logprobs": 0}',
        b'{"echo": true, "logprobs": 1}',
        b'{"echo": true, "messages": []}',
        b'{"echo": "\xff"}',
    ],
)
async def test_people_may_have_a_prompt_scored_on_a_cpu_only_while_nothing_else_is_asked(scoring):
    server = msgspec.convert({"model": "m", "engine_command": ["vllm"]}, ServerConfig)
    plain = b'{"prompt": "2+3", "logprobs": 1, "echo": false, "prompt_logprobs": null}'
    engine = VLLM(server, VLLMConfig(), "cpu", None)
    assert await meet(engine, plain, plain)
    assert await meet(engine, plain, b"")
    assert not await meet(engine, plain, scoring)
    assert not await meet(engine, scoring, plain)
    assert await meet(VLLM(server, VLLMConfig(), "cuda", None), scoring, scoring)
