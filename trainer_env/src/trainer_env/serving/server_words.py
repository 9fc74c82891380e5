"""What the settings of the server half mean: asked of `tandem-server`, which starts no engine for it."""

import subprocess
from pathlib import Path

import msgspec

from bridge.errors import ConfigError
from bridge.setting_words import Words
from trainer_env.arguments import BACKENDS
from trainer_env.serving.server_process import CHECK_TIMEOUT_S, environment_folder


def server_words(backend: str) -> dict[str, Words]:
    """Every setting and section of `[server]`, `[vllm]` and `[sglang]`, by its dotted key.

    backend: whose environment is asked first; the others know as much. Raises ConfigError when none is installed, or
    the one that is does not answer.
    """
    program = _folder(backend) / "bin" / "tandem-server"
    try:
        done = subprocess.run(
            [program, "--settings"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=True,
        )
        return {told.key: told for told in msgspec.json.decode(done.stdout, type=list[Words])}
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        raise ConfigError(
            "The server half does not say what its settings mean.",
            why=f"{program} --settings: {error}",
            log_tail=str(getattr(error, "stderr", None) or "").strip(),
            remedy="scripts/doctor.py checks the environments; scripts/setup_envs.sh mends them.",
        ) from error


def _folder(backend: str) -> Path:
    """The first environment that is there; the backend's own is what a refusal names."""
    for other in (backend, *BACKENDS):
        try:
            return environment_folder(other)
        except ConfigError:
            continue
    return environment_folder(backend)
