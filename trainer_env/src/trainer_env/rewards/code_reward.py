"""A reward for code that passes tests. It runs what a model wrote: the limits here are no sandbox."""

import ast
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_env.rewards import daemons
from trainer_env.rewards.completions import (
    Completion,
    RewardFunction,
    RowError,
    bounded,
    checked,
    last_block,
    text_of,
)

_PROGRAM = Path(__file__).with_name("run_tests.py")
_MAX_ANSWER_BYTES = 2**20
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

Step = tuple[str, bool]
"""Source, and whether it is a test that counts."""


def code_execution(
    *,
    tests_column: str = "tests",
    all_or_nothing: bool = False,
    seconds: float = 5.0,
    memory_mib: int = 1024,
    parallel: int = 0,
) -> RewardFunction:
    """The share of its example's tests that a completion's Python passes; all_or_nothing: 1 if it passes all, else 0.

    The code is the last ```python block, or all of the completion. tests_column holds a list of tests, or one text in
    which each top-level statement with an assert in it, or a call of a function of the text that asserts, is a test and
    all else prepares them (without one the whole text is one test). What only pytest or unittest would call is refused.
    Each completion runs in a process of its own with Python's standard library: an empty folder that is deleted
    afterwards, no input, no output, no environment, at most `seconds` of time and of CPU, memory_mib of memory,
    10 MiB a file, and (unless root runs it) no further process or thread. parallel: completions at once; 0: one a CPU.

    The limits stop accidents. Code that wants to can read your files, use the network, find its tests in memory, and as
    root leave processes behind: run untrusted models in a container or a virtual machine. Raises ValueError.
    """
    if not seconds > 0 or memory_mib < 64 or parallel < 0:
        raise ValueError("expected seconds above 0, memory_mib of at least 64 and parallel of at least 0")
    at_once = parallel or os.cpu_count() or 1

    def score(row: tuple[str, list[Step]]) -> float:
        code, steps = row
        passed = _passed(code, steps, seconds, memory_mib * 2**20)
        tests = sum(counts for _, counts in steps)
        return float(passed == tests) if all_or_nothing else passed / tests

    def steps_of(columns: Mapping[str, Sequence[Any]]) -> list[list[Step]]:
        if tests_column not in columns:
            raise ValueError(f"there is no column {tests_column!r} with tests; set tests_column")
        return [_steps(row, tests) for row, tests in enumerate(columns[tests_column])]

    def check(columns: Mapping[str, Sequence[Any]]) -> None:
        steps_of(columns)

    @checked(check)
    @bounded
    def reward(*, completions: Sequence[Completion], **columns: Any) -> list[float]:
        steps = steps_of(columns)
        codes = [_code(text_of(completion)) for completion in completions]
        return daemons.each(score, list(zip(codes, steps, strict=True)), at_once)

    return reward


def _code(text: str) -> str:
    block = last_block(text, ("python", "py", "python3"))
    return text if block is None else block


def _steps(row: int, tests: Any) -> list[Step]:
    """What is run after a completion. Raises RowError for what is no tests, and for a test that any code passes."""
    if isinstance(tests, str) and tests.strip():
        parts = _parsed(row, tests)
        listed = _listed(parts)
        return _steps_of_text(row, tests, parts) if listed is None else _steps(row, listed)
    if isinstance(tests, list) and tests and all(isinstance(test, str) for test in tests):
        return [_whole(row, test, _parsed(row, test)) for test in tests]
    raise RowError(row, f"expected its tests as text or as a list of texts, got {tests!r:.80}")


def _parsed(row: int, test: str) -> list[ast.stmt]:
    try:
        return ast.parse(test).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RowError(row, f"its tests are not Python: {error}") from None


def _listed(parts: Sequence[ast.stmt]) -> list[Any] | None:
    """The texts of a list that a column of plain text holds, as JSON or as Python writes it."""
    match parts:
        case [ast.Expr(value=ast.List() as tests)] if all(isinstance(test, ast.Constant) for test in tests.elts):
            return ast.literal_eval(tests)
    return None


def _steps_of_text(row: int, text: str, parts: Sequence[ast.stmt]) -> list[Step]:
    """Each statement of a text; those that assert are its tests. Without one the whole text is a test."""
    checks = {part.name for part in parts if isinstance(part, _FUNCTIONS) and _asserts(part.body, ())}
    steps = [(ast.unparse(part), not _is_idle(part) and _asserts([part], checks)) for part in parts]
    return steps if any(counts for _, counts in steps) else [_whole(row, text, parts)]


def _whole(row: int, text: str, parts: Sequence[ast.stmt]) -> Step:
    if all(map(_is_idle, parts)):
        raise RowError(
            row,
            f"its tests check nothing: {text!r:.80} calls no code and has no assert outside a function or class "
            "(what pytest or unittest would call is not called)",
        )
    return text, True


def _asserts(nodes: Iterable[ast.AST], checks: Collection[str]) -> bool:
    """Whether an assert, or a call of one of these functions, is in them outside a function or class of their own."""
    left = list(nodes)
    while left:
        match left.pop():
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.Assert():
                return True
            case ast.Call(func=ast.Name(id=name)) if name in checks:
                return True
            case node:
                left += ast.iter_child_nodes(node)
    return False


def _is_idle(part: ast.stmt) -> bool:
    """Whether a statement passes with any code: a definition, a value that is dropped, a block for the main program."""
    match part:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Compare()):
            return True
        case ast.Expr() | ast.Assign() | ast.AnnAssign():
            return not any(isinstance(node, ast.Call) for node in ast.walk(part))
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
    return False


def _passed(code: str, steps: Sequence[Step], seconds: float, memory_bytes: int) -> int:
    """How many tests pass. The process, and what it started in its session, is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-code-"))
    read, write = os.pipe()
    mark = secrets.token_hex(8)
    job = json.dumps({"mark": mark, "steps": [(code, False), *steps]})
    try:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(job.encode())
            stdin.seek(0)
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", _PROGRAM, str(seconds), str(memory_bytes), str(write)],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                pass_fds=(write,),
                start_new_session=True,
            )
        os.close(write)
        write = -1
        answer = _until_it_ends(process, read, time.monotonic() + seconds)
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
        shutil.rmtree(folder, ignore_errors=True)
    lines = answer.decode(errors="replace").splitlines()[: sum(counts for _, counts in steps)]
    return lines.count(f"{mark}1")


def _until_it_ends(process: subprocess.Popen[bytes], answers: int, deadline: float) -> bytes:
    """What a process answers until it ends, or until its time is up; its whole group is killed before it is reaped."""
    answer = b""
    ended = os.pidfd_open(process.pid)
    watched = select.poll()
    for end in (answers, ended):
        watched.register(end, select.POLLIN)
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready = [end for end, _ in watched.poll(left * 1000)]
            if answers in ready:
                part = os.read(answers, 2**16)
                answer += part
                if not part or len(answer) > _MAX_ANSWER_BYTES:
                    watched.unregister(answers)
            elif ended in ready:
                break
    finally:
        os.close(ended)
        # It is not reaped yet, so its number still means its group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return answer
