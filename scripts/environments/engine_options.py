"""List an engine's own options. Runs inside the engine's environment.

    python engine_options.py vllm|sglang OUT.json

The engine's stock entry point is started and stopped at the moment when it parses its command line, so the
list is the one that a real start would use, whatever module builds the parser. OUT.json holds

    engine, version
    options   a list of
        flags        option strings, such as ["--enable-lora", "--no-enable-lora"]
        dest         the engine's field name
        takes_value  false for a switch
        many         true when several values may follow
        choices      the allowed values, or null
        negatable    true when a `--no-…` form turns it off
        const        what a switch sets: true, false or null
"""

import argparse
import importlib
import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

_ENTRY_POINTS = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}
# Every engine's parser has one of these; parsers of other tools that start on the way have neither.
_MODEL_FLAGS = ("--model", "--model-path")


class _Parsing(BaseException):
    """Leaves the entry point with its parser; no handler for Exception on the way stops it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def capture_parser(engine: str) -> argparse.ArgumentParser:
    """The parser with which the engine's stock server reads its command line."""
    original = argparse.ArgumentParser.parse_known_args

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if any(flag in self._option_string_actions for flag in _MODEL_FLAGS):
            raise _Parsing(self)
        return original(self, *args, **kwargs)

    sys.argv = [_ENTRY_POINTS[engine], "--model" if engine == "vllm" else "--model-path", "none"]
    argparse.ArgumentParser.parse_known_args = stop
    try:
        runpy.run_module(_ENTRY_POINTS[engine], run_name="__main__", alter_sys=True)
    except _Parsing as found:
        return found.parser
    finally:
        argparse.ArgumentParser.parse_known_args = original
    sys.exit(f"{_ENTRY_POINTS[engine]} ended without parsing a command line")


def describe(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """The options of a parser, as plain data."""
    actions = parser._actions  # noqa: SLF001 - argparse has no other way to list what was added
    return [_describe(action) for action in actions if action.option_strings and action.dest != "help"]


def _describe(action: argparse.Action) -> dict[str, Any]:
    return {
        "flags": list(action.option_strings),
        "dest": action.dest,
        "takes_value": action.nargs != 0,
        "many": action.nargs in ("*", "+") or (isinstance(action.nargs, int) and action.nargs > 1),
        "choices": [_plain(choice) for choice in action.choices] if action.choices is not None else None,
        "negatable": isinstance(action, argparse.BooleanOptionalAction),
        "const": action.const if isinstance(action.const, bool) else None,
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def main() -> None:
    """Write the list."""
    engine, out = sys.argv[1], Path(sys.argv[2])
    warnings.simplefilter("ignore")
    options = describe(capture_parser(engine))
    version = getattr(importlib.import_module(engine), "__version__", "unknown")
    out.write_text(json.dumps({"engine": engine, "version": version, "options": options}, indent=1) + "\n")


if __name__ == "__main__":
    main()
