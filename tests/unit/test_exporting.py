"""What an export takes, writes and refuses, and that the command lines it prints are ones the engines have."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

import lora_files
from bridge.errors import BridgeError, ConfigError
from bridge.guard import living
from trainer_env import cli, config
from trainer_env.exporting import export
from trainer_env.exporting.export_folder import RECORD
from trainer_env.exporting.serve_commands import Served, asked_as, serve_commands
from trainer_env.runs.records import Best, Evaluation, StepMetrics

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "configs" / "demo.toml"
LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "head_dim": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(name)
    (folder / "model.safetensors").write_bytes(b"x" * 4000)
    return folder


@pytest.fixture
def a_run(base, tmp_path, monkeypatch):
    """A run's folder: checkpoints 4 and 8, what training ended with at 10, and the best one of step 4."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_VENVS", str(tmp_path / "none"))

    def make(*overrides, checkpoints=(4, 8), final=10, best=4, **adapter):
        folder = tmp_path / "runs" / "adding"
        folder.mkdir(parents=True)
        loaded = config.load(DEMO, ["run=adding", f'model.name="{base}"', *overrides])
        (folder / "config.toml").write_text(config.to_toml(loaded))
        places = {step: folder / "checkpoints" / f"checkpoint-{step}" for step in checkpoints}
        places |= {final: folder / "adapter"} if final else {}
        for step, place in places.items():
            lora_files.make(base, step, base_model_name_or_path="elsewhere", **adapter).write(place)
        if best:
            lora_files.make(base, best, **adapter).write(folder / "best")
        lines = [StepMetrics(step=step, version=step, reward_mean=step / 100) for step in range(1, 11)]
        (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        held_out = [Evaluation(phase="eval", step=4, reward_mean=0.7, examples=8, seconds=1)]
        (folder / "evaluations.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in held_out))
        return folder

    return make


def weights_of(base, step):
    return lora_files.make(base, step).data


def refusal(*args, **how):
    with pytest.raises(ConfigError) as refused:
        export(*args, **how)
    assert "\n" not in refused.value.what
    return str(refused.value)


def test_an_adapter_is_written_with_its_tokenizer_base_and_story(a_run, base, tmp_path):
    done = export(a_run(), tmp_path / "out")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert files == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "README.md",
        RECORD,
    }
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == weights_of(base, 10)
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "adapter of run adding after step 10 (reward 0.100)" in card
    assert str(base) in card
    assert "base_model:" not in card  # A folder is no name on a hub.
    assert done.asked == {"vllm": "adding", "sglang": f"{base}:adding"}  # SGLang's base answers for "adding".
    for backend, command in done.commands.items():
        assert f"```\n{command}\n```\n\nIt answers OpenAI's API for the model `{done.asked[backend]}`.\n" in card
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("which", "step"), [("last", 10), ("best", 4), ("8", 8), (4, 4), (10, 10)])
def test_which_adapter_is_a_word_or_a_step(a_run, base, tmp_path, which, step):
    done = export(a_run(), tmp_path / "out", which=which)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == weights_of(base, step)
    assert f"after step {step} (reward {step / 100:.3f}" in done.origin.describe()
    assert ("held-out examples 0.700" in done.origin.describe()) == (step == 4)


def test_the_last_one_of_a_run_that_was_killed_is_its_newest_checkpoint(a_run, base, tmp_path):
    run = a_run(final=None)
    assert export(run, tmp_path / "out").origin.step == 8
    lora_files.make(base, 6).write(run / "adapter")  # It ended once at step 6, went on, and was killed.
    summary = dict.fromkeys(["reward_first4", "reward_last4", "eval_before", "eval_after", "adapter"])
    summary |= {"backend": "vllm", "placement": "cpu", "steps": 6, "wall_s": 1, "restarts": 0}
    (run / "summary.json").write_text(json.dumps(summary))
    assert export(run, tmp_path / "again").origin.step == 8
    assert export(run, tmp_path / "six", which=6).origin.folder == run / "adapter"


def test_the_step_of_the_best_adapter_is_the_one_noted_beside_it(a_run, tmp_path):
    run = a_run()
    best = Best(step=6, reward_mean=0.4, version=6)  # It was kept, and the run killed before the evaluation's line.
    (run / "best" / "best.json").write_bytes(msgspec.json.encode(best))
    assert export(run, tmp_path / "out", which="best").origin.step == 6


def test_a_best_adapter_of_a_step_that_was_taken_again_keeps_its_own_figures(a_run, tmp_path):
    run = a_run()
    best = Best(step=4, reward_mean=0.9, version=4)  # The evaluation of step 4 that is recorded says 0.7.
    (run / "best" / "best.json").write_bytes(msgspec.json.encode(best))
    said = export(run, tmp_path / "out", which="best").origin.describe()
    assert said == "the adapter of run adding after step 4 (on held-out examples 0.900)"


def test_a_base_named_from_another_folder_is_found_where_the_run_found_it(a_run, base, tmp_path, monkeypatch):
    models = tmp_path / "models"
    models.mkdir()
    mine = base.rename(models / "mine")
    monkeypatch.chdir(tmp_path)
    run = a_run('model.name="models/mine"', checkpoints=(), final=None, best=None)
    lora_files.make(mine, 3, base_model_name_or_path=str(mine)).write(run / "adapter")
    monkeypatch.chdir(run)
    export(run, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(mine)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_what_is_not_there_is_said_in_one_line(a_run, tmp_path):
    run, out = a_run(best=None), tmp_path / "out"
    assert "no checkpoint of step 5" in (said := refusal(run, out, which=5))
    assert "There are: last, 4, 8." in said
    (run / "metrics.jsonl").unlink()  # Of what training ended with the step is not known now.
    assert "no checkpoint of step 0" in refusal(run, out, which=0)
    assert "no best adapter" in refusal(run, out, which="best")
    assert "got 'newest'" in refusal(run, out, which="newest")
    for folder in ("adapter", "checkpoints"):
        (run / folder).rename(tmp_path / folder)
    assert "has no adapter yet" in refusal(run, out)
    assert not out.exists()


def test_an_adapter_that_was_cut_short_is_refused(a_run, tmp_path):
    run = a_run()
    weights = run / "adapter" / "adapter_model.safetensors"
    for content in (weights.read_bytes()[:-1], b"", b"\xff" * 20):
        weights.write_bytes(content)
        assert "no whole safetensors file" in refusal(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_rank_stabilized_scaling_is_written_plainly(a_run, tmp_path):
    export(a_run(use_rslora=True, lora_alpha=16, rank=4), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["use_rslora"], written["lora_alpha"], written["r"]) == (False, 16 * math.sqrt(4), 4)


def test_the_hub_is_known_to_be_out_of_reach_before_its_client_is_imported(a_run, tmp_path, monkeypatch):
    client = tmp_path / "stand-ins" / "huggingface_hub"
    client.mkdir(parents=True)
    (client / "errors.py").write_text(
        "class HfHubHTTPError(Exception): pass\nclass LocalEntryNotFoundError(Exception): pass\n"
    )
    (client / "__init__.py").write_text(
        "import os\nfrom .errors import *\n"
        "def snapshot_download(*_, offline=os.environ['HF_HUB_OFFLINE'], **__):\n    raise OSError\n"
    )
    for name in ("huggingface_hub", "huggingface_hub.errors"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(client.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    done = export(a_run('model.name="owner/model"'), tmp_path / "out")
    assert "tokenizer is that of owner/model" in done.notes[0]
    assert sys.modules.pop("huggingface_hub").snapshot_download.__kwdefaults__ == {"offline": "1"}
    sys.modules.pop("huggingface_hub.errors")


def test_a_folder_of_somebody_else_is_never_touched(a_run, tmp_path):
    run, out = a_run(), tmp_path / "out"
    out.mkdir()
    export(run, out)  # An empty one will do.
    assert "is not empty" in refusal(run, out)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "README.md").write_text("mine")
    assert "--force replaces" in refusal(run, theirs)
    assert "nothing in it is replaced" in refusal(run, theirs, force=True)
    assert (theirs / "README.md").read_text() == "mine"
    (tmp_path / "file").write_text("")
    assert "is no folder" in refusal(run, tmp_path / "file", force=True)


def test_force_replaces_an_export_and_keeps_what_others_put_beside_it(a_run, base, tmp_path):
    run, out = a_run(), tmp_path / "out"
    export(run, out)
    (out / "notes").mkdir()
    (out / "notes" / "mine.txt").write_text("mine")
    export(run, out, which=8, force=True)
    assert (out / "adapter_model.safetensors").read_bytes() == weights_of(base, 8)
    assert (out / "notes" / "mine.txt").read_text() == "mine"
    assert "step 8" in (out / "README.md").read_text()
    # A file that the last export did not write, and the next one would.
    (out / "vocab.json").write_text("mine")
    (base / "vocab.json").write_text("{}")
    assert "is in the way" in refusal(run, out, force=True)
    assert (out / "vocab.json").read_text() == "mine"
    assert "step 8" in (out / "README.md").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_others_put_beside_an_export_stays_whole(a_run, tmp_path):
    run, out = a_run(), tmp_path / "out"
    export(run, out)
    subprocess.run(["git", "init", "-q", out], check=True)
    (out / "private").mkdir(mode=0o700)
    out.chmod(0o750)
    before = {path.relative_to(out): path.stat().st_mode for path in out.rglob("*")}
    export(run, out, which=8, force=True)
    assert {path.relative_to(out): path.stat().st_mode for path in out.rglob("*")} == before
    assert out.stat().st_mode & 0o777 == 0o750
    status = subprocess.run(["git", "-C", out, "status", "--short"], check=True, capture_output=True, text=True)
    assert "?? adapter_model.safetensors" in status.stdout
    # Where an export would write a file, somebody has a folder.
    (out / "vocab.json").mkdir()
    (tmp_path / "base" / "vocab.json").write_text("{}")
    assert "is in the way" in refusal(run, out, force=True)
    assert (out / "vocab.json").is_dir()


def test_a_folder_that_cannot_take_its_place_leaves_the_last_export(a_run, base, tmp_path, monkeypatch):
    run, out = a_run(), tmp_path / "out"
    export(run, out)
    rename = Path.rename

    def failing(path, target):
        if target == out and not path.name == "out":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BridgeError, match="out cannot be written: Input/output error"):
        export(run, out, which=8, force=True)
    assert (out / "adapter_model.safetensors").read_bytes() == weights_of(base, 10)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_export_never_takes_the_place_of_the_working_directory(a_run, tmp_path, monkeypatch):
    run = a_run()
    here = tmp_path / "here" / "below"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for out in (".", "..", "../../here", str(here)):
        assert "is the working directory, or has it inside" in refusal(run, Path(out))
    assert list(here.iterdir()) == []
    done = export(run, Path("../beside"))
    assert done.folder == tmp_path / "here" / "beside"
    assert f"adding={done.folder}" in done.commands["vllm"]


def test_a_place_that_cannot_be_made_is_one_line(a_run, tmp_path):
    run = a_run()
    (tmp_path / "file").write_text("")
    with pytest.raises(BridgeError, match=r"out cannot be written: Not a directory\.$"):
        export(run, tmp_path / "file" / "below" / "out")


def test_a_full_disk_is_one_line_and_leaves_the_last_export(a_run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk takes root")
    try:
        run = a_run()
        export(run, disk / "out")
        before = {file.name: file.read_bytes() for file in (disk / "out").iterdir()}
        (disk / "ballast").write_bytes(b"x" * (shutil.disk_usage(disk).free - (12 << 10)))
        with pytest.raises(BridgeError, match=r"The disk of .*out is full\.") as full:
            export(run, disk / "out", which=8, force=True)
        assert full.value.remedy
        assert {file.name: file.read_bytes() for file in (disk / "out").iterdir()} == before
        assert {path.name for path in disk.iterdir()} == {"out", "ballast"}
    finally:
        subprocess.run(["umount", "--lazy", disk], check=False)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Has merging find a module of this text in place of torch, which it imports first."""
    folder = tmp_path / "stand-ins"
    folder.mkdir()
    paths = [str(folder), *(path for path in sys.path if path.endswith("src"))]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return (folder / "torch.py").write_text


def test_what_merging_prints_before_it_dies_is_no_answer(a_run, tmp_path, stand_in):
    stand_in(
        "import os\nprint('[torch] loading', flush=True)\nos.write(1, b'\\xff')\nos.write(2, b'no more')\nos._exit(3)\n"
    )
    with pytest.raises(BridgeError, match="failed with exit status 3") as failed:
        export(a_run(), tmp_path / "out", what="merged")
    assert failed.value.log_tail == "no more"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_export_that_is_ended_leaves_nothing_running(a_run, tmp_path, stand_in, number, status):
    a_run()
    pid = tmp_path / "pid"
    stand_in(
        f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(f'{{os.getpid()}}\\n')\ntime.sleep(1000)\n"
    )
    words = ["export", "adding", "--out", "out", "--what", "merged"]
    main = f"import sys; from trainer_env.cli import main; sys.exit(main({words}))"
    with subprocess.Popen([sys.executable, "-c", main], cwd=tmp_path) as command:
        wait_for(lambda: pid.is_file() and pid.read_text().endswith("\n"))
        merging = int(pid.read_text())
        assert living(merging)
        command.send_signal(number)
        assert command.wait(90) == status
    wait_for(lambda: not living(merging))
    if number == signal.SIGTERM:
        assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "out"))]


def wait_for(happened):
    for _ in range(1800):
        if happened():
            return
        time.sleep(0.05)
    raise TimeoutError


def test_an_adapter_of_half_a_stack_has_no_command_for_sglang(a_run, tmp_path):
    done = export(a_run('lora.target_modules=["q_proj"]', targets=("q_proj", "o_proj")), tmp_path / "out")
    assert list(done.commands) == ["vllm"]
    assert "only together with k_proj, v_proj" in done.notes[0]


def test_the_command_says_where_it_is_and_how_to_serve_it(a_run, base, tmp_path, capsys):
    a_run()
    assert cli.main(["export", "adding", "--out", "out", "--which", "8"]) == 0
    printed = capsys.readouterr().out
    assert "the adapter of run adding after step 8 (reward 0.080)" in printed
    assert f"--lora-modules adding={tmp_path}/out" in printed
    asked = [line for line in printed.splitlines() if line.startswith("and ask for the model ")]
    assert [line.rpartition(" ")[2] for line in asked] == ["adding", f"{base}:adding"]
    assert cli.main(["export", "addin", "--out", "other"]) == 2
    assert "Did you mean adding?" in capsys.readouterr().err
    assert cli.main(["export", "adding", "--out", "out"]) == 2


SERVED = {
    "adapter": Served(
        model="owner/base", name="adding", adapter=Path("/tmp/my adapter"), dtype="bfloat16", rank=12,
        modules=lora_files.ALL, trust_remote_code=True,
    ),
    "merged": Served(model="/tmp/merged", name="adding"),
}  # fmt: skip


@pytest.mark.parametrize("what", ["adapter", "merged"])
@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_commands_use_flags_that_the_installed_engine_has(backend, what):
    from server_env.engines.options import EngineOptions

    environment = Path(sys.prefix).resolve().parent / f"server-{backend}"
    listed = environment / "engine_options.json"
    if not listed.is_file():
        pytest.skip(f"the {backend} environment is not installed")
    known = msgspec.json.decode(listed.read_bytes(), type=EngineOptions)
    words = shlex.split(serve_commands(SERVED[what], environment.parent)[backend])
    start = next(index for index, word in enumerate(words) if word.startswith("--"))
    assert str(environment / "bin" / "python") in words[:start]
    known.check(words[start:], "the command")
    for word in words[:start]:
        if word.startswith("PYTHONPATH="):
            assert (Path(word.removeprefix("PYTHONPATH=")) / "sitecustomize.py").is_file()


def test_commands_where_no_engine_is_installed_are_those_of_their_projects(tmp_path):
    adapter, merged = (serve_commands(SERVED[what], tmp_path) for what in ("adapter", "merged"))
    assert merged["vllm"].startswith("vllm serve /tmp/merged --host 127.0.0.1")
    assert merged["sglang"].startswith("python -m sglang.launch_server --model-path /tmp/merged")
    assert "'adding=/tmp/my adapter' --max-lora-rank 16" in adapter["vllm"]
    assert "--max-lora-rank 12 --lora-target-modules q_proj k_proj" in adapter["sglang"]
    assert all("--trust-remote-code" in command for command in adapter.values())
    assert all("--served-model-name adding" in command for command in merged.values())
    assert {asked_as(SERVED["merged"], backend) for backend in merged} == {"adding"}
    assert not re.search("cpu|--lora|PYTHONPATH", " ".join(merged.values()))
