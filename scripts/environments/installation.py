"""The doctor's checks of the installed environments: against the lock, and that their compiled parts load."""

import importlib.metadata
import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from environments import atomic, compiling, smoke
from environments.findings import Finding
from environments.install import Plan
from environments.lockfile import Lock
from environments.processes import clean_environment

PROBE_TIMEOUT_S = 180.0
_SETUP = "run scripts/setup_envs.sh"
# Compiled parts by environment; a CPU section has only those that run there.
_COMPILED = {
    ("trainer", "cpu"): ("torch", "torchao"),
    ("trainer", "cuda"): ("torch", "torchao", "triton", "bitsandbytes", "xformers"),
    ("server-vllm", "cpu"): ("torch", "vllm"),
    ("server-vllm", "cuda"): ("torch", "triton", "vllm"),
    ("server-sglang", "cpu"): ("torch",),
    ("server-sglang", "cuda"): ("torch", "triton", "sgl_kernel", "flashinfer"),
}


def as_built(plan: Plan, lock: Lock) -> Plan:
    """The plan of what is there instead: from the section that it names itself, where the lock still has that."""
    section = lock.sections.get((atomic.read_marker(plan.link) or {}).get("section", ""))
    return replace(plan, section=section, accelerator=section.accelerator) if section else plan


def check(plans: list[Plan], accelerator: str) -> list[Finding]:
    """Check each environment, which is to run on `accelerator`.

    One server is enough to run; the trainer is not to be done without.
    """
    with ThreadPoolExecutor() as pool:
        found = [finding for findings in pool.map(environment, plans) for finding in findings]
    found += [_other(plan, accelerator) for plan in plans if plan.accelerator != accelerator]
    servers = [plan for plan in plans if plan.environment.engine]
    if servers and not any(plan.link.exists() for plan in servers):
        found.append(Finding("servers", "failure", "neither server environment is installed", _SETUP))
    return found


def environment(plan: Plan) -> list[Finding]:
    """Check one environment."""
    name = plan.environment.name
    if not (plan.link / "bin" / "python").exists():
        missing = "warning" if plan.environment.engine else "failure"
        return [Finding(name, missing, f"{plan.link} is not installed", f"{_SETUP} --only {name}")]
    return [_against_lock(plan), *_options(plan), *compiling.check(plan, installed(plan)), *_compiled(plan)]


def _other(plan: Plan, accelerator: str) -> Finding:
    name = plan.environment.name
    why = f"was built for {plan.accelerator}, and a run here is for {accelerator}"
    return Finding(f"{name} accelerator", "warning", why, f"{_SETUP} --only {name} --accelerator {accelerator}")


def _against_lock(plan: Plan) -> Finding:
    name = plan.environment.name
    wrong = differences(plan)
    listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    marker = atomic.read_marker(plan.link)
    if marker is None:
        differs = f" and differs from envs.lock: {listed}" if wrong else ""
        return Finding(name, "warning", f"was not made by setup_envs.sh{differs}", f"{_SETUP} --only {name}")
    if wrong:
        return Finding(name, "failure", f"differs from envs.lock: {listed}", f"{_SETUP} --only {name}")
    if marker.get("digest") != plan.digest:
        return Finding(name, "warning", "is of an older lock or recipe", f"{_SETUP} --only {name}")
    return Finding(name, "ok", f"{plan.section.key}, {len(plan.section.packages)} packages as locked")


def differences(plan: Plan) -> list[str]:
    """Packages of the environment that are not as the lock has them."""
    found = installed(plan)
    return [
        f"{name} {found.get(name, 'is missing')} instead of {version}"
        for name, version in plan.section.pins.items()
        if found.get(name) != version
    ]


def installed(plan: Plan) -> dict[str, str]:
    """Version by package name, of what the environment has."""
    folders = [str(path) for path in plan.link.glob("lib/python3*/site-packages")]
    return {
        re.sub(r"[-_.]+", "-", distribution.name).lower(): distribution.version
        for distribution in importlib.metadata.distributions(path=folders)
    }


def _options(plan: Plan) -> Iterator[Finding]:
    if plan.environment.engine and not (plan.link / smoke.OPTIONS_FILE).exists():
        name = f"{plan.environment.name} options"
        why = f"{smoke.OPTIONS_FILE} is missing, so engine flags are not checked before a start"
        yield Finding(name, "warning", why, f"{_SETUP} --only {plan.environment.name}")


def _compiled(plan: Plan) -> Iterator[Finding]:
    modules = _COMPILED.get((plan.environment.name, plan.accelerator), ())
    if not modules:
        return
    script = Path(__file__).with_name("probe_extensions.py")
    python = plan.link / "bin" / "python"
    try:
        answer = subprocess.run(
            [python, script, *modules],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_TIMEOUT_S,
            env=clean_environment({"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}),
        )
    except subprocess.TimeoutExpired:
        name = f"{plan.environment.name} extensions"
        yield Finding(name, "warning", f"no answer in {PROBE_TIMEOUT_S:.0f} s", "run the doctor on an idle machine")
        return
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{"module"')]
    yield from (judge(plan, line["module"], line["status"], line["detail"]) for line in lines)
    for module in modules[len(lines) :][:1]:
        last = (answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"])[-1]
        yield judge(plan, module, "failed", f"the process ended: {last}")


def judge(plan: Plan, module: str, status: str, detail: str) -> Finding:
    """What it means that a compiled part did not load."""
    name = f"{plan.environment.name} {module}"
    if status in ("loaded", "absent"):
        return Finding(name, "ok", "its compiled part loads" if status == "loaded" else "not installed, not needed")
    if status == "skipped" and plan.accelerator == "cpu" and "incompatible torch" not in detail:
        return Finding(name, "ok", "runs without its CUDA kernels on a CPU")
    if "incompatible torch" in detail:
        versions = f"torch {plan.section.pins.get('torch')} and {module} {plan.section.pins.get(module)}"
        remedy = f"{_SETUP} --only {plan.environment.name}; if it stays, lock a {module} made for this torch"
        return Finding(name, "failure", f"{versions} do not go together: {detail}", remedy)
    return Finding(
        name, "failure", f"its compiled part did not load: {detail}", f"{_SETUP} --only {plan.environment.name}"
    )
