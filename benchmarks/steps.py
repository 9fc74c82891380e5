"""Time the optimizer steps of tandem-train in several variants, one run after another.

    .venvs/trainer/bin/python benchmarks/steps.py --model FOLDER --variants sync,ahead,time-share [options]

sync and ahead differ in rollout.max_staleness alone, 0 and 1, in the placement of --placement. time-share, shared and
split are placements, with the staleness that Tandem gives each. Prints a table: medians of a step, the start, and the
peak of GPU memory.

step s is the wall time from one step's end to the next one's, so it counts what no other figure does. A start is the
time from the command to the first step's beginning. With --cold N each variant runs N steps first, with nothing
compiled in advance (the files it reads may be in memory), and what it compiled is there for the run that is timed;
without, the user's own caches are used.

On a host without FlashAttention's binaries SGLang needs --set sglang.attention_backend='"triton"',
sglang.sampling_backend='"pytorch"' and sglang.grammar_backend='"none"'; without those of FlashInfer's sampler vLLM
needs VLLM_USE_FLASHINFER_SAMPLER=0 in the environment.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from job import Job, add_arguments, job_of
from report import Report
from runs_of import Run, caches, end_on_sigterm, shorter, tandem

PLACEMENTS = ("time-share", "shared", "split")
VARIANTS = ("sync", "ahead", *PLACEMENTS)

Start = Callable[[Job, Path, Mapping[str, str]], Run]
"""Runs a job in a folder with some variables more."""


def variant_arguments(variant: str, options: argparse.Namespace) -> list[str]:
    """What tandem-train is told to make it this variant."""
    one_gpu = variant in ("time-share", "shared")
    arguments = ["--placement", variant if variant in PLACEMENTS else options.placement]
    if options.server_gpus:
        arguments += ["--server-gpus", options.server_gpus.partition(",")[0] if one_gpu else options.server_gpus]
    if options.trainer_gpus and not one_gpu:
        arguments += ["--trainer-gpus", options.trainer_gpus]
    if variant in ("sync", "ahead"):
        arguments += ["--set", f"rollout.max_staleness={int(variant == 'ahead')}"]
    return arguments


def tandem_start(variant: str, options: argparse.Namespace) -> Start:
    """How a variant of Tandem is run."""

    def start(job: Job, folder: Path, environment: Mapping[str, str]) -> Run:
        arguments = variant_arguments(variant, options)
        return tandem(variant, job, options, folder, arguments=arguments, environment=environment)

    return start


def measure(start: Start, job: Job, options: argparse.Namespace, folder: Path) -> tuple[Run, Run | None]:
    """The run that is timed and, with --cold, the one before it that found nothing compiled."""
    if not options.cold:
        return start(job, folder / "run", {}), None
    environment = caches(folder / "caches")
    cold = start(shorter(job, options.cold), folder / "cold", environment)
    return (start(job, folder / "run", environment) if not cold.problem else cold), cold


def all_of(starts: Mapping[str, Start], job: Job, options: argparse.Namespace, report: Report, title: str) -> int:
    """Measure each and show them side by side; the exit code."""
    with tempfile.TemporaryDirectory(prefix="tandem-steps-", ignore_cleanup_errors=True) as scratch:
        for name, start in starts.items():
            print(f"{name} …", flush=True)
            folder = (options.keep or Path(scratch)).resolve() / name
            run, cold = measure(start, job, options, folder)
            report.add(run, cold)
            report.show(title)
    return 1 if report.failed else 0


def title_of(job: Job) -> str:
    """The job in a line."""
    rows = f"{job.prompts} prompts x {job.completions} completions x {job.max_tokens} tokens"
    return f"{Path(job.model).name}: {rows}, {job.micro_batch} rows at a time, LoRA rank {job.rank}"


def variants_of(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """The variants that were asked for, in their order."""
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))}; there are: {', '.join(VARIANTS)}")
    return names


def main() -> int:
    """Run the variants, print, and say whether all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default="sync,ahead", help=f"of {','.join(VARIANTS)} (%(default)s)")
    parser.add_argument("--placement", default="auto", help="of sync and ahead, as for tandem-train (%(default)s)")
    add_arguments(parser)
    options = parser.parse_args()
    job, variants = job_of(parser, options), variants_of(parser, options.variants)
    end_on_sigterm()
    starts = {variant: tandem_start(variant, options) for variant in variants}
    return all_of(starts, job, options, Report(options, job=job.as_json()), f"{title_of(job)}, {options.backend}")


if __name__ == "__main__":
    sys.exit(main())
