"""Time a GRPO step of Tandem's peers, and of Tandem, on the same GPUs with the same model, sizes and prompts.

    .venvs/trainer/bin/python benchmarks/peers.py --model FOLDER --peers unsloth,trl --variants shared,split [options]

unsloth: Unsloth's in-process fast_inference, trainer and vLLM sharing the first of --server-gpus.
trl: TRL's GRPOTrainer on --trainer-gpus, with `trl vllm-serve` on --server-gpus; NCCL carries the merged weights.
--variants are those of steps.py; the table has them all side by side, and the figures mean the same in each column.

The peers need one Python that imports vLLM and the trainer's packages: the trainer environment's, with --vllm-site on
PYTHONPATH, the folder that holds the package vllm. Give it where the two were built for the same torch.
"""

import argparse
import json
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_use import family
from job import ROOT, Job, add_arguments, job_of
from report import Report
from runs_of import Child, Run, end_on_sigterm, watch
from steps import Start, all_of, tandem_start, title_of, variants_of

SCRIPTS = ROOT / "benchmarks" / "peers"
PEERS = ("unsloth", "trl")


def unsloth_start(options: argparse.Namespace) -> Start:
    """How Unsloth's in-process engine is run."""

    def start(job: Job, folder: Path, environment: Mapping[str, str]) -> Run:
        path = _write(job, folder, memory_share=options.share)
        environment = {**_python_path(options), **environment, **_visible(options.server_gpus.partition(",")[0])}
        command = [_python(options), str(SCRIPTS / "unsloth_in_process.py"), str(path)]
        with Child(command, folder, environment, "unsloth.log") as child:
            pid = child.process.pid
            return watch(
                "unsloth",
                child,
                folder / "metrics.jsonl",
                lambda: {"trainer": family(pid)},
                timeout_s=options.timeout_s,
            )

    return start


def trl_start(options: argparse.Namespace) -> Start:
    """How TRL and its server are run. Both begin at once, as in Tandem."""

    def start(job: Job, folder: Path, environment: Mapping[str, str]) -> Run:
        port, group_port = _free_ports(2)
        path = _write(job, folder, port=port, group_port=group_port, server_timeout_s=options.timeout_s)
        environment = {**_python_path(options), **environment}
        with ExitStack() as stack:
            server, trainer = (
                stack.enter_context(Child(command, folder, environment | _visible(gpus), log))
                for command, gpus, log in (
                    (_serve(job, options, port), options.server_gpus, "server.log"),
                    (
                        [_python(options), str(SCRIPTS / "trl_with_server.py"), str(path)],
                        options.trainer_gpus,
                        "trl.log",
                    ),
                )
            )
            pids = {"trainer": trainer.process.pid, "server": server.process.pid}
            return watch(
                "trl",
                trainer,
                folder / "metrics.jsonl",
                lambda: {half: family(pid) for half, pid in pids.items()},
                timeout_s=options.timeout_s,
                beside=[server],
            )

    return start


def _serve(job: Job, options: argparse.Namespace, port: int) -> list[str]:
    """The command line of `trl vllm-serve`."""
    settings: dict[str, Any] = {
        "model": job.model,
        "host": "127.0.0.1",
        "port": port,
        "gpu_memory_utilization": options.server_share,
        "dtype": job.dtype,
        "max_model_len": job.context,
        "log_level": "warning",
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [_python(options), "-m", "trl.scripts.vllm_serve", *words]


def _write(job: Job, folder: Path, **more: Any) -> Path:
    """The job for a peer's script."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.json"
    content = job.as_json() | {"prompts_file": str(job.write_prompts(folder)), **more}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def _python(options: argparse.Namespace) -> str:
    return str(options.venvs.resolve() / "trainer" / "bin" / "python")


def _python_path(options: argparse.Namespace) -> dict[str, str]:
    return {"PYTHONPATH": str(options.vllm_site.resolve())} if options.vllm_site else {}


def _visible(gpus: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> int:
    """Run peers and variants, print, and say whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="unsloth", help=f"of {','.join(PEERS)} (%(default)s)")
    parser.add_argument("--variants", default="shared", help="of Tandem, as for steps.py (%(default)s)")
    parser.add_argument("--placement", default="auto", help="of sync and ahead, as for tandem-train (%(default)s)")
    parser.add_argument("--vllm-site", type=Path, metavar="PATH", help="folder that holds the package vllm")
    parser.add_argument("--share", type=float, default=0.5, help="of the GPU for Unsloth's vLLM (%(default)s)")
    parser.add_argument("--server-share", type=float, default=0.9, help="for TRL's server (%(default)s)")
    add_arguments(parser)
    parser.set_defaults(server_gpus="0", trainer_gpus="1")
    options = parser.parse_args()
    job, variants = job_of(parser, options), variants_of(parser, options.variants)
    starts: dict[str, Start] = {}
    for peer in filter(None, options.peers.split(",")):
        if peer not in PEERS:
            parser.error(f"--peers: {peer}; there are: {', '.join(PEERS)}")
        starts[peer] = unsloth_start(options) if peer == "unsloth" else trl_start(options)
    if starts and job.model.startswith("builtin:"):
        parser.error("--model: the peers take a folder")
    end_on_sigterm()
    starts |= {variant: tandem_start(variant, options) for variant in variants}
    report = Report(options, job=job.as_json())
    return all_of(starts, job, options, report, f"{title_of(job)}; Tandem's engine: {options.backend}")


if __name__ == "__main__":
    sys.exit(main())
