"""Do the compiled parts of an environment load? Runs inside that environment.

    python probe_extensions.py MODULE ...     prints one JSON object a line: module, status, detail

Status is `loaded`, `absent` (not installed), `skipped` (the module came up without its compiled part and only
logged that) or `failed`. `vllm` stands for the kernels that vLLM picks for this machine.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import logging
import re
import sys
import warnings

_SKIPPED = re.compile(r"skipping import|failed to (load|import)|incompatible torch", re.IGNORECASE)


class _Messages(logging.Handler):
    """Keeps every log message of every logger."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def probe(module: str) -> dict[str, str]:
    """Import one module and watch what it says."""
    if importlib.util.find_spec(module) is None:
        return {"module": module, "status": "absent", "detail": ""}
    messages, printed = _Messages(), io.StringIO()
    root = logging.getLogger()
    root.addHandler(messages)
    root.setLevel(logging.DEBUG)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            _load(module)
    except Exception as error:  # noqa: BLE001 - whatever a foreign module raises is the finding
        return {"module": module, "status": "failed", "detail": f"{type(error).__name__}: {error}"[:500]}
    finally:
        root.removeHandler(messages)
    said = [line for line in (*messages.lines, *printed.getvalue().splitlines()) if _SKIPPED.search(line)]
    return {"module": module, "status": "skipped" if said else "loaded", "detail": said[0][:500] if said else ""}


def _load(module: str) -> None:
    if module == "vllm":
        # vLLM logs a warning when its kernels do not load; its loggers do not pass messages on by themselves.
        platforms = importlib.import_module("vllm.platforms")
        logging.getLogger("vllm").propagate = True
        platforms.current_platform.import_kernels()
    else:
        importlib.import_module(module)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        print(json.dumps(probe(name)), flush=True)
