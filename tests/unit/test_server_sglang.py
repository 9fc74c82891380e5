"""SGLang's own: the CPU recipe, slots counted with the base model, the context's spare end, keys, what is not asked."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

import lora_files
from bridge.errors import ConfigError, EngineFailed, Refused
from bridge.protocol import Sampling
from hub_files import cached
from served import tiny_model
from server_env.config import ServerConfig
from server_env.engines import sglang, sglang_http
from server_env.engines.engine import Endpoint, EngineGone
from server_env.engines.engine_http import KEEP_ALIVE_S
from server_env.engines.options import EngineOptions, Option
from server_env.engines.sglang import CPU_STAND_INS, SGLangConfig, environment, resolve
from server_env.engines.sglang_http import SGLang

CPU_RECIPE = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "lora_backend": "torch_native",
    "disable_overlap_schedule": True,
}


def server(**section):
    return msgspec.convert({"model": "m", "engine_command": ["x"], "backend": "sglang", **section}, ServerConfig)


def resolved(native=None, device="cpu", **section):
    return resolve(server(**section), msgspec.convert(native or {}, SGLangConfig), device)


@pytest.fixture
def model(tmp_path):
    return str(tiny_model(tmp_path / "model"))


@pytest.fixture
def endpoint(tmp_path):
    return Endpoint(tmp_path / "engine1.sock", tmp_path, 4321, "normal-key", "admin-key")


def test_on_a_cpu_it_runs_on_its_native_fallbacks_and_on_a_gpu_as_it_likes(model):
    on_cpu, on_gpu = resolved(model=model), resolved(model=model, device="cuda")
    for name, value in CPU_RECIPE.items():
        assert getattr(on_cpu, name) == value
        assert getattr(on_gpu, name) is None
    assert on_gpu.max_total_tokens is None
    assert on_cpu.sleep_on_idle
    assert on_gpu.sleep_on_idle


def test_the_base_model_takes_a_slot_of_its_own():
    assert resolved(max_staleness=1).max_loras_per_batch == 4
    with pytest.raises(ConfigError, match=r"max_loras_per_batch \(which counts the base model\): room for 2 versions"):
        resolved({"max_loras_per_batch": 3})


def test_the_kv_cache_on_cpu_fits_its_share_of_memory_and_one_context(model):
    values = 2 * 2 * 64
    assert resolved(model=model, cpu_kv_gib=1, dtype="float32").max_total_tokens == sglang.CPU_TOKENS
    assert (1 << 30) // (values * 4) > sglang.CPU_TOKENS
    assert resolved(model="hub/name").max_total_tokens == sglang.CPU_TOKENS_UNKNOWN
    assert resolved(model="hub/name", context_length=8000).max_total_tokens == 16000
    assert resolved({"max_total_tokens": 77}, model=model).max_total_tokens == 77


def test_the_context_gets_the_spare_end_that_sglang_keeps_free(model, tmp_path):
    assert resolved(model=model, context_length=100).context_length == 100 + sglang.SPARE_CONTEXT
    assert resolved(model=model, context_length=1024).context_length == 1024 + sglang.SPARE_CONTEXT
    assert resolved(model=model, context_length=1025).context_length == 1025
    assert resolved(model="hub/name", context_length=100).context_length == 100
    assert resolved({"context_length": 100}, model=model).context_length == 100
    longer = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    for wanted, allowed in ((100, False), (1024, True), (2000, False)):
        options = resolved(model=model, context_length=wanted)
        assert (longer in environment(server(model=model), options, "cpu", tmp_path, tmp_path)) is allowed


def test_a_model_on_the_hub_is_known_as_its_folder_is_once_it_is_cached(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cached(tmp_path / "hub", "hub/name", {"config.json": Path(model, "config.json").read_bytes()})
    assert resolved(model="hub/name", context_length=1024).context_length == 1024 + sglang.SPARE_CONTEXT
    assert resolved(model="hub/name").max_total_tokens == sglang.CPU_TOKENS
    options = resolved(model="hub/name", context_length=1024)
    variables = environment(server(model="hub/name"), options, "cpu", tmp_path, tmp_path)
    assert variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    assert "HF_HUB_OFFLINE" not in variables  # The engine has the weights to fetch.


async def test_a_model_that_the_engine_was_the_first_to_fetch_is_known_once_it_answers(model, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    engine = SGLang(server(model="hub/name"), SGLangConfig(), "cpu", None)
    adapter = lora_files.make(Path(model), 1, targets=("q_proj", "v_proj")).write(tmp_path / "adapter")
    with pytest.raises(Refused, match="k_proj"):
        await engine.load_adapter("one", adapter)
    cached(tmp_path / "hub", "hub/name", {"config.json": Path(model, "config.json").read_bytes()})
    with pytest.raises(EngineGone):  # There is no engine here to answer.
        await engine.probe()
    with pytest.raises(EngineGone):
        await engine.load_adapter("one", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "q_proj", "v_proj"]


def test_the_stand_ins_are_on_the_path_of_cpu_runs_only(tmp_path, model):
    def variables(device, **section):
        config = server(model=model, **section)
        return environment(config, resolved(model=model), device, tmp_path / "cache", tmp_path / "scratch")

    on_cpu, on_gpu = variables("cpu"), variables("cuda")
    assert on_cpu["PYTHONPATH"] == str(CPU_STAND_INS)
    assert (CPU_STAND_INS / "sitecustomize.py").is_file()
    assert on_cpu["SGLANG_USE_CPU_ENGINE"] == on_cpu["OMP_NUM_THREADS"] == "1"
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE", "OMP_NUM_THREADS"} & on_gpu.keys()
    assert on_gpu["TMPDIR"] == str(tmp_path / "scratch")
    assert on_gpu["HF_HUB_OFFLINE"] == "1"
    assert float(on_gpu["SGLANG_TIMEOUT_KEEP_ALIVE"]) > KEEP_ALIVE_S
    assert variables("cpu", engine_env={"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_keys_are_in_a_file_that_the_command_line_names(endpoint):
    engine = SGLang(server(), SGLangConfig(), "cpu", None)
    line = engine.command(endpoint)
    assert "normal-key" not in " ".join(line)
    assert "admin-key" not in " ".join(line)
    ((path, content),) = engine.private_files(endpoint).items()
    assert line[line.index("--config") + 1] == str(path)
    assert path.suffix == ".yaml"  # SGLang looks at the ending.
    assert json.loads(content) == {"api-key": "normal-key", "admin-api-key": "admin-key"}
    assert line[line.index("--host") + 1] == "127.0.0.1"
    assert line[line.index("--port") + 1] == "4321"


def test_an_option_that_this_version_lacks_is_named_with_version_and_neighbour():
    names = [*SGLangConfig.__struct_fields__]
    known = [Option((f"--{n.replace('_', '-')}",), n) for n in names if n not in ("cuda_graph_max_bs", "enable_ep_moe")]
    installed = EngineOptions("sglang", "0.5.23", (*known, Option(("--cuda-graph-max-bs-decode",))))
    SGLang(server(), SGLangConfig(), "cpu", installed)
    with pytest.raises(ConfigError) as caught:
        SGLang(server(), SGLangConfig(cuda_graph_max_bs=8), "cpu", installed)
    assert "sglang.cuda_graph_max_bs: --cuda-graph-max-bs: sglang 0.5.23 has no such option" in caught.value.what
    assert caught.value.remedy == "The nearest option is --cuda-graph-bs."


async def test_what_would_end_the_scheduler_or_bring_an_adapter_back_is_never_asked(model):
    """There is no engine here: a question that was asked would end in EngineGone."""
    engine = SGLang(server(model=model), SGLangConfig(), "cpu", None)
    for prompt in ([], [5, -1], [5, 512]):
        with pytest.raises(Refused):
            await engine.score("", prompt)
        with pytest.raises(Refused):
            await engine.generate("", prompt, 2, Sampling())
    for ask in (
        engine.score("gone", [5, 6]),
        engine.generate("gone", [5], 1, Sampling()),
        engine.unload_adapter("gone"),
    ):
        with pytest.raises(Refused, match="404: adapter gone is not loaded"):
            await ask
    async with asyncio.timeout(60):
        await engine.wake()  # Nothing was given back, so nothing is taken: SGLang would die of it.
        await engine.wake_weights()


@pytest.mark.parametrize(
    ("where", "prompt_and_n", "ahead"),
    [
        (("cpu", (64, 128, 2)), (64, 2), True),
        (("cpu", (64, 128, 2)), (63, 8), False),
        (("cpu", (64, 128, 2)), (500, 1), False),
        (("cuda", (576, 1536, 30)), (96, 8), False),  # SmolLM2-135M
        (("cuda", (576, 1536, 30)), (1000, 8), True),
        (("cuda", (1536, 8960, 28)), (96, 8), True),  # Qwen2-1.5B
        (("cuda", (0, 0, 0)), (96, 8), True),  # Of a model that is not known.
    ],
)
async def test_a_groups_prompt_is_read_ahead_of_its_samples_where_that_saves_more_than_it_costs(
    tmp_path, monkeypatch, where, prompt_and_n, ahead
):
    (device, sizes), (prompt_tokens, n), folder = where, prompt_and_n, tiny_model(tmp_path / "model")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    config = json.loads((folder / "config.json").read_text()) | dict(zip(names, sizes, strict=True)) | {"head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    engine, asked = SGLang(server(model=str(folder)), SGLangConfig(), device, None), []

    async def post(_, body, *__):
        asked.append((len(body.rid), body.sampling_params[0].max_new_tokens))
        raise EngineGone

    monkeypatch.setattr("server_env.engines.engine_http.EngineHttp.post", lambda _, *words: post(*words))
    with pytest.raises(EngineGone):
        await engine.generate("", [5] * prompt_tokens, n, Sampling(max_tokens=7))
    assert asked == ([(1, 0)] if ahead else [(n, 7)])


async def test_an_engine_that_is_never_idle_is_not_put_to_sleep(monkeypatch):
    engine, asked = SGLang(server(sleep=True), SGLangConfig(), "cuda", None), []

    async def busy(route, *_):
        asked.append(route)
        raise Refused("2 requests are running")

    monkeypatch.setattr(engine._http, "post", busy)
    monkeypatch.setattr(sglang_http, "IDLE_TIMEOUT_S", -1.0)
    with pytest.raises(EngineFailed, match="cannot sleep") as failed:
        await engine.sleep()
    assert "2 requests are running" in failed.value.why
    assert asked == ["/flush_cache"]


async def test_sleep_waits_until_every_cancelled_request_has_been_aborted(monkeypatch):
    engine, asked, aborted = SGLang(server(sleep=True), SGLangConfig(), "cuda", None), [], asyncio.Event()

    async def post(route, *_):
        if route == "/abort_request":
            await aborted.wait()
        asked.append(route)

    monkeypatch.setattr(engine._http, "post", post)
    engine._abort(["one"])
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.02)
    assert asked == []
    aborted.set()
    await sleeping
    assert asked == ["/abort_request", "/flush_cache", "/release_memory_occupation"]
