#!/usr/bin/env bash
# Prepare the environments, then run every check: formatting, types, the lock, and the tests, folder by folder.
#
#   bash scripts/test.sh           everything but the long runs (20 to 30 minutes on two fast cores, up to an hour on slow ones)
#   bash scripts/test.sh --full    the long runs too
#   bash scripts/test.sh --quick   only what needs no engine and no torch (5 to 10 minutes)
#
# Which environment runs which folder:
#   dev      tests/unit  tests/integration  tests/engines (starts real engines)  tests/e2e (starts real runs)
#            tests/gpu (skipped where there is no CUDA GPU)
#   trainer  tests/trainer
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-}
case "$mode" in
"" | --full | --quick) ;;
*)
    echo "usage: bash scripts/test.sh [--quick | --full]" >&2
    exit 2
    ;;
esac
unset PYTHONPATH PYTHONDONTWRITEBYTECODE # Without bytecode each start of torch compiles it anew.
export HF_HUB_OFFLINE=1 TANDEM_TEST_FULL=$([[ $mode == --full ]] && echo 1 || echo 0)

step() {
    printf '\n== %s (%ds)\n' "$1" "$SECONDS"
}

step "environments"
if [[ $mode == --quick ]]; then
    bash scripts/setup_envs.sh --only dev
else
    bash scripts/setup_envs.sh --dev
fi
venvs=${TANDEM_VENVS:-.venvs}
dev=$venvs/dev/bin

step "ruff, pyright, envs.lock"
"$dev/ruff" check .
"$dev/ruff" format --check .
"$dev/pyright" --pythonpath "$dev/python"
"$dev/python" scripts/lock_envs.py check

if ! command -v chromium chromium-browser google-chrome >/dev/null && [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
    step "a browser, for the report's page"
    (
        export DEBIAN_FRONTEND=noninteractive
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null
    ) || echo "no browser could be installed: the tests of the report's page are skipped"
fi

step "tests/unit tests/integration"
"$dev/python" -m pytest -q -n 3 --dist loadscope tests/unit tests/integration # They mostly wait for processes.
if [[ $mode == --quick ]]; then
    exit 0
fi

# Engines compute little and load for long: the trainer's tests run beside them, and are shown afterwards.
step "tests/engines, and tests/trainer beside them"
beside=$(mktemp)
"$venvs/trainer/bin/python" -m pytest -q tests/trainer >"$beside" 2>&1 &
trainer=$!
trap 'kill "$trainer" 2>/dev/null || true; rm -f "$beside"' EXIT
failed=0
"$dev/python" -m pytest -q tests/engines || failed=1
wait "$trainer" || failed=1
cat "$beside"
[[ $failed == 0 ]]

step "tests/e2e tests/gpu"
"$dev/python" -m pytest -q tests/e2e tests/gpu

step "done"
