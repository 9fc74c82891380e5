#!/bin/sh
# Build Tandem's isolated environments (trainer, server-vllm, server-sglang) from envs.lock.
#   scripts/setup_envs.sh [--only NAME ...] [--dev] [--notebook] [--accelerator cpu|cuda|any]
# A repeat takes about a second; an interrupted run is safe to repeat.
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
for python in ${TANDEM_PYTHON:-} python3 python3.12 python3.11 python3.13 python; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        PYTHONPATH=$here exec "$python" -P -m environments "$@"
    fi
done
echo "error: no Python 3.11 or newer: $(python3 --version 2>&1 || true) is what this machine has." \
    "Do: install python3.11 or python3.12, or name one with TANDEM_PYTHON=/path/to/python" >&2
exit 1
