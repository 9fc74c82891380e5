"""Write down where an engine listens, then become it: `python listening.py vllm|sglang [the engine's options]`.

A benchmark has tandem-server run this as `server.engine_command`, with the Python of the server's environment. Its own
requests can then go to the very process that tandem-server asks. The file that TANDEM_LISTENING names gets, readable by
its owner alone, a JSON object: `socket` (vLLM's Unix socket) or `port`, `key` and `admin_key` (SGLang's).
"""

import argparse
import json
import os
import sys
from pathlib import Path

from bridge.endpoint import write_private

VARIABLE = "TANDEM_LISTENING"


def where(options: list[str]) -> dict[str, str]:
    """What an engine's command line says of its address. SGLang's keys are in the file that its --config names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--uds", "--port", "--config"):
        parser.add_argument(name, default="")
    found, _ = parser.parse_known_args(options)
    keys = json.loads(Path(found.config).read_bytes()) if found.config else {}
    return {
        "socket": found.uds,
        "port": found.port,
        "key": keys.get("api-key", ""),
        "admin_key": keys.get("admin-api-key", ""),
    }


def main() -> None:
    """Does not return."""
    from server_env.engines import sglang, vllm

    backend, *options = sys.argv[1:]
    write_private(Path(os.environ[VARIABLE]), json.dumps(where(options)).encode())
    command = {"vllm": vllm, "sglang": sglang}[backend].command()
    os.execv(command[0], [*command, *options])


if __name__ == "__main__":
    main()
