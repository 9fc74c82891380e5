"""What a run made, as a folder for others: the adapter, or the whole model with the adapter in it."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from bridge.errors import BridgeError, ConfigError, Failure, from_failure
from bridge.hub_cache import expanded
from trainer_env import config as configs
from trainer_env import models
from trainer_env.exporting.export_folder import replace_folder, require_place
from trainer_env.exporting.exported_from import Origin, find_adapter
from trainer_env.exporting.model_card import model_card
from trainer_env.exporting.serve_commands import Served, asked_as, half_stacks, serve_commands
from trainer_env.models.hub import go_offline_unless_reachable
from trainer_env.runs.finding import CONFIG
from trainer_env.runs.run_folder import is_full

What = Literal["adapter", "merged"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
)
MERGE_TIMEOUT_S = 3600.0


class Exported(msgspec.Struct, frozen=True):
    """commands: how to serve the folder, by backend; asked: which model to ask for then. notes: for people."""

    folder: Path
    commands: dict[str, str]
    asked: dict[str, str]
    origin: Origin
    notes: tuple[str, ...] = ()


def export(
    run_dir: Path, out: Path, *, what: What = "adapter", which: str | int = "last", force: bool = False
) -> Exported:
    """Write a run's adapter, or the model with it, into a folder of its own.

    which: `last`, `best`, or the step of a checkpoint. force: replace what an earlier export wrote into out; anything
    else that lies there stays. A folder is whole or not there. Raises ConfigError and BridgeError.
    """
    if what not in get_args(What):
        raise ConfigError(f"Expected adapter or merged, got {what!r}.")
    config = configs.load(run_dir / CONFIG)
    origin = find_adapter(run_dir, which)
    with _in_words(out):
        require_place(out, force=force)
    out = out.resolve()
    modules = _modules(origin.folder / ADAPTER_FILES[1])
    base = _base(config, origin.folder)
    notes: list[str] = []
    with _in_words(out), _aside(out) as aside:
        settings = _adapter_settings(origin.folder, base)
        if what == "adapter":
            _write_adapter(origin.folder, aside, settings)
        else:
            _merge(base, origin.folder, aside, config)
            if config.model.load_in_4bit:
                notes.append("It was trained over the base in 4 bit and is merged into the base in 16: answers differ.")
        if not _copy_tokenizer(base, aside):
            notes.append(f"The tokenizer is that of {base}: its files could not be found here.")
        served = Served(model=str(out), name=run_dir.resolve().name, trust_remote_code=config.model.trust_remote_code)
        if what == "adapter":
            served = msgspec.structs.replace(
                served,
                model=base,
                adapter=out,
                dtype=config.model.dtype,
                rank=settings["r"],
                modules=modules,
            )
        if others := half_stacks(served.modules):
            notes.append(
                f"SGLang serves such an adapter only together with {', '.join(others)}: export the merged model for it."
            )
        commands = serve_commands(served)
        asked = {backend: asked_as(served, backend) for backend in commands}
        card = model_card(origin, base=base, what=what, rank=served.rank, commands=commands, asked=asked, notes=notes)
        (aside / "README.md").write_text(card, encoding="utf-8")
        replace_folder(aside, out, {"run": run_dir.name, "step": origin.step, "what": what})
    return Exported(out, commands, asked, origin, tuple(notes))


def _base(config: configs.TrainConfig, adapter: Path) -> str:
    """The base model as anybody here can find it: an absolute folder, or a name on the hub. Raises ConfigError."""
    name = config.model.name
    if name.startswith(models.PREFIX):
        return models.resolve(name)
    written = Path(str(_read(adapter / ADAPTER_FILES[0]).get("base_model_name_or_path") or ""))
    if written.is_absolute() and written.is_dir():
        return str(written)  # A name in the config is seen from where the run was made.
    a_folder = expanded(name).is_dir() or name.startswith(("/", ".", "~")) or name.count("/") > 1
    return models.resolve(name) if a_folder else name


def _adapter_settings(adapter: Path, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for others. Scaling is written plainly: SGLang knows no other."""
    settings = _read(adapter / ADAPTER_FILES[0]) | {"base_model_name_or_path": base, "inference_mode": True}
    if settings.get("use_rslora"):
        settings |= {"use_rslora": False, "lora_alpha": settings["lora_alpha"] * math.sqrt(settings["r"])}
    return settings


def _write_adapter(adapter: Path, folder: Path, settings: dict[str, Any]) -> None:
    (folder / ADAPTER_FILES[0]).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(adapter / ADAPTER_FILES[1], folder / ADAPTER_FILES[1])


def _merge(base: str, adapter: Path, folder: Path, config: configs.TrainConfig) -> None:
    """In a process of its own. Raises what it says, or BridgeError with the end of what it printed."""
    dtype = "float16" if config.model.dtype == "float16" else "bfloat16"
    command = [sys.executable, "-m", "trainer_env.exporting.merging", base, str(adapter), str(folder)]
    command += ["--parent", str(os.getpid()), "--dtype", dtype]
    command += ["--trust-remote-code"] if config.model.trust_remote_code else []
    if not Path(base).is_dir():
        models.resolve(base)  # Says plainly what is wrong with a name, and goes offline where there is no network.
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=MERGE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise BridgeError(
            f"Merging took more than {MERGE_TIMEOUT_S:g} s.", remedy="Look for a machine that swaps, then try again."
        ) from error
    if done.returncode == 0:
        return
    if failure := _failure(done.stdout):
        raise from_failure(failure)
    if is_full(Exception(done.stderr)):
        raise OSError(28, "No space left on device")
    raise BridgeError(
        f"Merging the adapter into {base} failed with exit status {done.returncode}.",
        why="It was killed: the machine is short of memory." if done.returncode == -9 else "",
        log_tail="\n".join(done.stderr.strip().splitlines()[-8:]),
        remedy="Export the adapter alone, --what adapter, or merge on a machine with more memory.",
    )


def _failure(printed: str) -> Failure | None:
    """What merging says went wrong, in its last line; None when it came to an end before it could."""
    try:
        return msgspec.json.decode(printed.strip().rpartition("\n")[2], type=Failure)
    except msgspec.MsgspecError:
        return None


def _copy_tokenizer(base: str, folder: Path) -> bool:
    """The base's tokenizer beside it, byte for byte; whether it was found."""
    source = Path(base)
    if not source.is_dir():
        go_offline_unless_reachable()
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            source = Path(snapshot_download(base, allow_patterns=list(TOKENIZER_FILES)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
            return False
    found = [file for pattern in TOKENIZER_FILES for file in source.glob(pattern) if file.is_file()]
    for file in found:
        shutil.copyfile(file, folder / file.name)
    return bool(found)


def _modules(weights: Path) -> tuple[str, ...]:
    """The projections that an adapter changes, by name: its settings may hold a pattern, its tensors never do.

    Raises ConfigError for a file that was cut short.
    """
    try:
        with weights.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            tensors = {name: tensor for name, tensor in json.loads(file.read(size)).items() if name != "__metadata__"}
        whole = weights.stat().st_size == 8 + size + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, KeyError, OverflowError, MemoryError):
        whole, tensors = False, {}
    if not whole:
        raise ConfigError(
            f"{weights} is no whole safetensors file.",
            why="The run was killed while it was written.",
            remedy="Export another step: --which STEP.",
        )
    return tuple(sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}))


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read.", why=str(error)) from None


@contextmanager
def _aside(out: Path) -> Iterator[Path]:
    """A folder to write into, beside where it goes; gone again if that fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        aside.chmod(0o755)
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _in_words(out: Path) -> Iterator[None]:
    """What the file system refuses as a BridgeError, a full disk plainly."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise BridgeError(
                f"The disk of {out} is full.", why=str(error), remedy="Make room, or name a folder on another disk."
            ) from error
        raise BridgeError(f"{out} cannot be written: {error.strerror or error}.") from error
