"""`tandem-server`: the command line. Parses first and imports late, so that --help and mistakes are quick."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.errors import BridgeError
    from server_env.config import ServerFile

EXIT_FAILED = 1
EXIT_CONFIG = 2


def parser() -> argparse.ArgumentParser:
    """The command line of tandem-server."""
    result = argparse.ArgumentParser(
        prog="tandem-server", description="Tandem's server half: drives vLLM or SGLang and answers the trainer."
    )
    result.add_argument("--config", type=Path, required=True, metavar="FILE", help="server.toml")
    result.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/server"),
        metavar="DIR",
        help="where logs and connection.json go (default: runs/server)",
    )
    result.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key, e.g. vllm.max_num_seqs=64"
    )
    result.add_argument("--listen", metavar="ADDRESS", help="ipc, or tcp://host:port (encrypted)")
    result.add_argument(
        "--http", metavar="HOST:PORT", help="offer the engine's OpenAI API and /metrics on a loopback port (0: any)"
    )
    result.add_argument(
        "--metrics-address",
        metavar="ADDRESS",
        help="where /metrics alone is: ipc (default; a Unix socket that only you can open), or a loopback HOST:PORT",
    )
    result.add_argument(
        "--node-rank",
        type=int,
        metavar="N",
        help="which node of an engine on server.nnodes machines this is; above 0 it only runs that node's part",
    )
    result.add_argument(
        "--trainer",
        type=int,
        metavar="PID",
        help="the trainer that starts this server: while it lives, server.attach_within_s does not run",
    )
    result.add_argument(
        "--check", action="store_true", help="check the configuration, print the engine's command line, start nothing"
    )
    result.add_argument(
        "--settings",
        action=_Settings,
        nargs=0,
        help="print every setting of server.toml as JSON: what it means and takes, and its default",
    )
    return result


class _Settings(argparse.Action):
    """Like --help: it needs nothing else on the command line."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print, and end."""
        import msgspec

        from server_env.config import all_words

        print(msgspec.json.encode(all_words()).decode())
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run tandem-server; the exit code: 0 after an orderly end, 1 when the engine failed, 2 for a wrong config."""
    arguments = parser().parse_args(argv)
    run_dir = arguments.run_dir

    from bridge.errors import BridgeError, ConfigError

    try:
        file = _configuration(arguments)
        if arguments.check:
            print(_command_line(file))
        else:
            rank = _node_rank(file)
            run_dir = run_dir / f"node-{rank}" if rank else run_dir
            _serve(file, rank, run_dir, arguments.trainer)
    except BridgeError as error:
        print(f"tandem-server: {error}", file=sys.stderr, flush=True)
        _leave_word(run_dir, error)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return 0


def _configuration(arguments: argparse.Namespace) -> "ServerFile":
    from server_env.config import load

    overrides = list(arguments.set)
    addresses = {name: getattr(arguments, name) for name in ("listen", "http", "metrics_address")}
    overrides += [f'server.{name}="{value}"' for name, value in addresses.items() if value is not None]
    if arguments.node_rank is not None:
        overrides.append(f"server.node_rank={arguments.node_rank}")
    return load(arguments.config, overrides)


def _command_line(file: "ServerFile") -> str:
    import os
    import shlex

    from server_env.engines.backends import NOWHERE, device_of, make_engine
    from server_env.gpus import shares

    engine = make_engine(file)
    shares(file.server, device_of(file), engine.gpus, os.environ)
    return shlex.join(engine.command(NOWHERE))


def _node_rank(file: "ServerFile") -> int:
    from server_env.engines.backends import make_engine

    return make_engine(file).node_rank


def _serve(file: "ServerFile", rank: int, run_dir: Path, trainer: int | None) -> None:
    import asyncio
    import logging

    from bridge.endpoint import private_dir

    private_dir(run_dir)
    (run_dir / "server_failure.json").unlink(missing_ok=True)
    logging.basicConfig(
        filename=run_dir / "server.log", level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from server_env import gateway, node
    from server_env.adapters.heap import keep_freed_memory

    keep_freed_memory()
    asyncio.run(node.serve(file, run_dir) if rank else gateway.serve(file, run_dir, trainer))


def _leave_word(run_dir: Path, error: "BridgeError") -> None:
    """Tell whoever started this server, in a file that outlives it."""
    import msgspec

    from bridge.endpoint import write_private
    from bridge.errors import to_failure

    if run_dir.is_dir():
        write_private(run_dir / "server_failure.json", msgspec.json.encode(to_failure(error)))


if __name__ == "__main__":
    sys.exit(main())
