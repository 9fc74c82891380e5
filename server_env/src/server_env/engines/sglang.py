"""SGLang's options under SGLang's own names, and how they become its command line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from bridge.errors import ConfigError
from server_env.adapters.peft_adapter import BaseModel
from server_env.engines import cuda_toolkit, flags, sglang_memory
from server_env.engines.engine_http import KEEP_ALIVE_S
from server_env.engines.options import EngineOptions

if TYPE_CHECKING:
    from server_env.config import ServerConfig

DISTRIBUTIONS = ("sglang",)
RESERVED = ("--config", "--host", "--port", "--api-key", "--admin-api-key", "--device")

SPARE_CONTEXT = 6
"""SGLang refuses a prompt that comes so near to the end of its context, and stops some tokens before it."""

CPU_STAND_INS = Path(__file__).with_name("sglang_cpu")
"""On PYTHONPATH of a CPU run only: see sitecustomize.py there."""

CPU_TOKENS = 65536
"""Largest KV cache on CPU: SGLang copies its list of free slots, one a token, whenever a request ends."""

CPU_TOKENS_UNKNOWN = 8192
"""The KV cache on CPU for a model of which nothing is known."""


class SGLangConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[sglang]`. None: not passed, so SGLang's default holds. extra_args go to SGLang as they are."""

    model_path: str | None = None
    """What SGLang loads: a folder or a hub name. Left out: server.model."""
    tokenizer_path: str | None = None
    """A folder or a hub name. Left out: server.tokenizer."""
    tokenizer_mode: str | None = None
    """"auto": the fast tokenizer where there is one; "slow"."""
    load_format: str | None = None
    """What the weights are read from, such as "safetensors"; "dummy" makes random ones up."""
    trust_remote_code: bool | None = None
    """Run the Python that comes with the model. Left out: server.trust_remote_code."""
    random_seed: int | None = None
    """Of SGLang's random numbers. Left out: server.seed."""
    skip_tokenizer_init: bool | None = None
    """Load no tokenizer: only token ids go in and come out."""
    context_length: int | None = None
    """Tokens of prompt and completion together. Left out: server.context_length, and 6 that SGLang keeps free."""
    mem_fraction_static: float | None = None
    """For weights and KV cache, part of what is free of each GPU's memory as SGLang starts, from 0 to 1. Left out: what
    comes to server.memory_share then.
    """
    max_running_requests: int | None = None
    """Sequences decoded at once. Left out: server.max_sequences."""
    max_total_tokens: int | None = None
    """Tokens that the KV cache holds. Left out: on a GPU as memory allows, on a CPU by server.cpu_kv_gib."""
    chunked_prefill_size: int | None = None
    """Tokens of a prompt read in one piece; -1: prompts are read whole, as server.chunked_prefill = false says."""
    max_prefill_tokens: int | None = None
    """Tokens of prompts in one batch; the model's context where that is more."""
    schedule_policy: str | None = None
    """Which waiting request comes next, such as "fcfs" (in order) or "lpm" (longest cached prefix)."""
    schedule_conservativeness: float | None = None
    """Above 1 fewer requests start at once; for when many are taken back for want of KV cache."""
    cpu_offload_gb: int | None = None
    """GB of weights that stay in main memory."""
    dtype: str | None = None
    """Of weights and activations. Left out: server.dtype."""
    kv_cache_dtype: str | None = None
    """Of the KV cache; "auto" is the model's. One that rounds samples from another policy than is trained."""
    tp_size: int | None = None
    """GPUs that each layer is split over. Left out: server.tensor_parallel."""
    pp_size: int | None = None
    """Groups of GPUs that the layers are split over, one after another."""
    dp_size: int | None = None
    """Copies of the model inside one engine: 1, since SGLang loads adapters into one only. See server.data_parallel."""
    ep_size: int | None = None
    """GPUs that the experts of a mixture are split over."""
    base_gpu_id: int | None = None
    """The first GPU to use, counted among those that it sees."""
    nnodes: int | None = None
    """Machines that the engine spreads over. Left out: server.nnodes."""
    node_rank: int | None = None
    """Which of these machines this is, from 0. Left out: server.node_rank."""
    dist_init_addr: str | None = None
    """`host:port` of the first node, where all meet. Left out: server.dist_init_addr."""

    disable_cuda_graph: bool | None = None
    """No CUDA graphs. Left out: true where server.cuda_graphs is false."""
    disable_cuda_graph_padding: bool | None = None
    """Use a CUDA graph only for a batch of exactly its size."""
    cuda_graph_max_bs: int | None = None
    """The largest batch, in sequences, that a CUDA graph is recorded for. Gone from SGLang 0.5.23."""
    cuda_graph_bs: tuple[int, ...] | None = None
    """The batches, in sequences, that CUDA graphs are recorded for. Gone from SGLang 0.5.23."""
    enable_torch_compile: bool | None = None
    """Compile the model with torch.compile."""
    torch_compile_max_bs: int | None = None
    """The largest batch, in sequences, that is compiled for."""
    attention_backend: str | None = None
    """The kernels of attention. Left out: on a CPU "torch_native"."""
    sampling_backend: str | None = None
    """The kernels of sampling. Left out: on a CPU "pytorch"."""
    grammar_backend: str | None = None
    """What holds completions to a grammar; Tandem asks for none."""
    triton_attention_reduce_in_fp32: bool | None = None
    """Triton's attention adds up in float32, for float16 models."""
    triton_attention_num_kv_splits: int | None = None
    """Parts of the KV cache that Triton's decoding works on at the same time."""
    num_continuous_decode_steps: int | None = None
    """Decoding steps between two looks at what waits."""
    torchao_config: str | None = None
    """Quantize with torchao. Gone from SGLang 0.5.23."""

    disable_radix_cache: bool | None = None
    """Keep no prompt's KV cache for others. Left out: true where server.prefix_cache is false."""
    enable_nccl_nvls: bool | None = None
    """NCCL's NVLink SHARP for prompts."""
    disable_outlines_disk_cache: bool | None = None
    """The grammars of outlines are not kept on disk."""
    disable_custom_all_reduce: bool | None = None
    """NCCL in place of SGLang's own all-reduce."""
    disable_overlap_schedule: bool | None = None
    """Plan a batch only when the one before is done. Left out: true on a CPU."""
    enable_mixed_chunk: bool | None = None
    """Pieces of prompts and decoding in one batch."""
    enable_dp_attention: bool | None = None
    """Attention in copies, the rest split over the GPUs; for models with few KV heads."""
    enable_ep_moe: bool | None = None
    """Split the experts of a mixture over the GPUs. Gone from SGLang 0.5.23."""
    enable_nan_detection: bool | None = None
    """Look for NaN in the logits. Gone from SGLang 0.5.23."""
    enable_p2p_check: bool | None = None
    """See whether the GPUs reach each other's memory rather than take it for granted."""
    enable_memory_saver: bool | None = None
    """Able to give the KV cache's memory back. Left out: server.sleep."""
    allow_auto_truncate: bool | None = None
    """Cut a prompt that is too long rather than refuse it: samples of other prompts than are trained on. Leave it out.
    """
    enable_multimodal: bool | None = None
    """Serve images too, where the model can."""
    sleep_on_idle: bool | None = None
    """Wait without using a core. Left out: true."""

    enable_lora: bool | None = None
    """Serve adapters. Always true here."""
    max_lora_rank: int | None = None
    """The largest rank of an adapter. Left out: server.max_lora_rank."""
    lora_target_modules: tuple[str, ...] | None = None
    """The projections that adapters may change. Left out: all that SGLang can serve."""
    max_loras_per_batch: int | None = None
    """Adapters in one batch, the base model counted as one. Left out: server.adapter_slots and 1."""
    max_loaded_loras: int | None = None
    """Adapters kept in main memory. Left out: server.adapters_held."""
    lora_eviction_policy: str | None = None
    """Which adapter leaves a full GPU: "lru" (unused for longest) or "fifo"."""
    lora_backend: str | None = None
    """The kernels of adapters. Left out: on a CPU "torch_native"."""
    lora_paths: tuple[str, ...] | None = None
    """Adapters to load at the start, each `path` or `name=path`; Tandem asks for none of them."""
    enable_lora_overlap_loading: bool | None = None
    """Copy an adapter to the GPU while others compute."""

    log_level: str | None = None
    """How much SGLang logs. Left out: "warning"."""
    log_level_http: str | None = None
    """How much its HTTP server logs. Left out: as log_level."""
    log_requests: bool | None = None
    """Log each request."""
    log_requests_level: int | None = None
    """What of it, from 0 (no content) to 3 (all of it, prompts and completions)."""
    show_time_cost: bool | None = None
    """Log the times of SGLang's own marks."""
    enable_metrics: bool | None = None
    """Prometheus figures. Left out: server.metrics."""
    decode_log_interval: int | None = None
    """Decoding steps between two lines of the log and two readings of the figures."""

    extra_args: tuple[str, ...] = ()
    """Flags and values for SGLang's command line, as they are: what has no key here."""


def resolve(server: "ServerConfig", native: SGLangConfig, device: str) -> SGLangConfig:
    """The options that SGLang gets: intents under its names, and over them what `[sglang]` says. device: cpu or cuda.

    Raises ConfigError for a choice that training with it would not survive.
    """
    base = BaseModel.read(native.model_path or server.model)
    intents: dict[str, Any] = {
        "model_path": server.model,
        "tokenizer_path": server.tokenizer or None,
        "trust_remote_code": server.trust_remote_code or None,
        "dtype": server.dtype,
        "random_seed": server.seed,
        "context_length": _context(server.context_length, base),
        "max_running_requests": server.max_sequences,
        "disable_radix_cache": None if server.prefix_cache else True,
        "chunked_prefill_size": None if server.chunked_prefill else -1,
        "disable_cuda_graph": None if server.cuda_graphs else True,
        "tp_size": server.tensor_parallel if server.tensor_parallel > 1 else None,
        "nnodes": server.nnodes if server.nnodes > 1 else None,
        "node_rank": server.node_rank if server.nnodes > 1 or server.node_rank else None,
        "dist_init_addr": server.dist_init_addr or None,
        "enable_memory_saver": server.sleep or None,
        "enable_metrics": server.metrics or None,
        "log_level": "warning",
        # The scheduler would otherwise keep a core busy while it waits, and the trainer's threads wait for that core.
        "sleep_on_idle": True,
        "enable_lora": True,
        "max_lora_rank": server.max_lora_rank,
        "lora_target_modules": ("all",),
        "max_loras_per_batch": server.slots + 1,  # The base model takes a slot.
        "max_loaded_loras": server.held,
    }
    if device == "cuda":
        share = server.memory_share
        intents["mem_fraction_static"] = None if share is None else sglang_memory.unmeasured(share)
    else:
        intents |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "lora_backend": "torch_native",
            "disable_overlap_schedule": True,
            "max_total_tokens": _cpu_tokens(server, base),
        }
    resolved = flags.merged(intents, native)
    _check(resolved, server, device)
    return resolved


def _context(wanted: int | None, base: BaseModel) -> int | None:
    """The context with which SGLang can fill the wanted one, if the model has it."""
    return wanted + SPARE_CONTEXT if wanted and wanted <= base.max_context else wanted


def _cpu_tokens(server: "ServerConfig", base: BaseModel) -> int:
    """Tokens of KV cache that fit into cpu_kv_gib, and at least one whole context."""
    width = 4 if server.dtype == "float32" else 2
    fitting = (server.cpu_kv_gib << 30) // (base.kv_values * width) if base.kv_values else CPU_TOKENS_UNKNOWN
    return max(min(fitting, CPU_TOKENS), 2 * (server.context_length or 0))


def _check(options: SGLangConfig, server: "ServerConfig", device: str) -> None:
    flags.check_adapters(
        server,
        enabled=("sglang.enable_lora", options.enable_lora),
        at_once=("sglang.max_loras_per_batch (which counts the base model)", (options.max_loras_per_batch or 0) - 1),
        held=("sglang.max_loaded_loras", options.max_loaded_loras or 0),
    )
    if (options.dp_size or 1) > 1:
        raise ConfigError(
            f"sglang.dp_size: SGLang loads adapters into one replica only, and dp_size is {options.dp_size}.",
            remedy="Leave it out; sglang.tp_size spreads one replica over several GPUs.",
        )
    flags.check_nodes(
        server,
        nnodes=("sglang.nnodes", options.nnodes or 1),
        rank=("sglang.node_rank", options.node_rank or 0),
        meets=("sglang.dist_init_addr", options.dist_init_addr is not None),
        gpus=gpus(options),
    )
    if options.enable_memory_saver and device == "cpu":
        raise ConfigError("server.sleep: SGLang can sleep on a GPU only.", remedy="Leave server.sleep out.")


def gpus(options: SGLangConfig) -> int:
    """How many GPUs it computes on, those of all nodes together."""
    return (options.tp_size or 1) * (options.pp_size or 1)


def arguments(options: SGLangConfig, installed: EngineOptions | None = None) -> list[str]:
    """The command line of resolved options. Raises ConfigError naming one that this version does not have."""
    return flags.arguments("sglang", options, installed, negatable=False, reserved=RESERVED)


def command(wrapper: Sequence[str] = ()) -> list[str]:
    """The program, without options. wrapper: what to run instead (see ServerConfig.engine_command)."""
    if wrapper:
        return list(wrapper)
    flags.package_folder("sglang", "SGLang")
    return [sys.executable, "-m", "sglang.launch_server"]


def environment(
    server: "ServerConfig", options: SGLangConfig, device: str, cache: Path, scratch: Path
) -> dict[str, str]:
    """The variables that SGLang needs. cache: kept between runs; scratch: this run's, with a short path."""
    variables = {
        # Its inner sockets lie there: nobody else may come near them.
        "TMPDIR": str(scratch),
        # Its own 5 s are fewer than what our connections are kept for: some would be closed as they are used again.
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(round(5 * KEEP_ALIVE_S)),
        **flags.compiled_caches(cache),
        **flags.offline(options.model_path),
    }
    own = BaseModel.read(options.model_path or "").max_context
    if own and own < (options.context_length or 0) <= own + SPARE_CONTEXT:
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # For the spare part, which is never used.
    if device == "cpu":
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(CPU_STAND_INS),
            # Its small operations are quicker on one thread, and much quicker beside a trainer.
            "OMP_NUM_THREADS": "1",
        }
    else:
        variables |= cuda_toolkit.variables(cache)
    return variables | server.engine_env
