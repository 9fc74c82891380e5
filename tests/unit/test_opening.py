"""From what people write to a run: which config holds, and what it is called."""

import errno
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from bridge.errors import BridgeError, ConfigError
from trainer_env import config
from trainer_env.runs.run_folder import needing_room, step_to_resume
from trainer_env.session import Session, opening

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copy(ROOT / "configs" / "smoke.toml", tmp_path / "job.toml"))


def made(run: str, *overrides: str, output_dir: str = "runs") -> None:
    """A run's folder with its own config."""
    folder = Path(output_dir) / run
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml(config.load(Path("job.toml"), [*overrides, f"run={run}"])))
    (folder / "metrics.jsonl").write_text("{}\n")


def test_a_new_run_is_named_after_its_file(job):
    found, source = opening.find("job.toml", ["grpo.max_steps=3"])
    assert found.run.startswith("job-")
    assert (found.grpo.max_steps, found.output_dir, source) == (3, "runs", "job.toml")


def test_without_a_file_it_is_the_demo_wherever_one_is(job):
    found, source = opening.find(None, [], run="x")
    assert found.model.name == "builtin:smollm2-135m-instruct"
    assert source.endswith("configs/demo.toml")


@pytest.mark.parametrize("name", ["smoke", "qwen-gsm8k"])
def test_a_bare_name_is_one_that_comes_with_tandem(job, name):
    assert opening.find(name, [])[1].endswith(f"configs/{name}.toml")


def test_a_bare_name_that_does_not_come_with_it_is_a_file(job):
    with pytest.raises(ConfigError, match="other"):
        opening.find("other", [])


def test_a_run_that_exists_goes_by_its_own_config_and_the_overrides(job):
    made("old", "grpo.max_steps=7", "seed=5")
    found, source = opening.find("job.toml", ["grpo.max_steps=9"], run="old")
    assert (found.grpo.max_steps, found.seed, found.run) == (9, 5, "old")
    assert source == "runs/old/config.toml"


def test_what_was_not_trained_yet_may_still_be_changed(job):
    made("old", "seed=5")
    Path("runs/old/metrics.jsonl").write_text("")
    assert opening.find("job.toml", ["seed=6"], run="old")[0].seed == 6
    assert opening.find(None, [], run="old")[0].seed == 5


def test_a_run_that_its_file_names_is_gone_on_with_too(job):
    made("old", "seed=5")
    found, source = opening.find("job.toml", ["run=old"])
    assert (found.seed, source) == (5, "runs/old/config.toml")


@pytest.mark.parametrize("run", ["my run!", "a/b", "../z", "."])
def test_a_name_that_is_none_is_refused(job, run):
    with pytest.raises(ConfigError, match="run"):
        opening.find("job.toml", [], run=run)


def test_an_override_only_has_to_fit_the_run_that_exists(job):
    made("old", 'rewards=[{function="length",args={target=3}},{function="regex",args={pattern="w"}}]')
    found, _ = opening.find(None, ["rewards.1.weight=2"], run="old", output_dir="runs")
    assert found.rewards[1].weight == 2


def test_a_run_that_was_moved_is_where_it_is_found(job):
    made("old", output_dir="elsewhere")
    found, _ = opening.find(None, [], run="old", output_dir="elsewhere")
    assert found.run_dir == Path("elsewhere/old")


def test_a_config_made_in_python_is_taken_as_it_is(job):
    found, _ = opening.find(config.load(job), ["grpo.max_steps=7"], run="mine")
    assert (found.run, found.grpo.max_steps) == ("mine", 7)


def test_a_config_made_in_python_is_checked_as_one_that_is_read(job):
    wrong = msgspec.structs.replace(config.load(job), model=config.ModelConfig(name="x", max_seq_length=3))
    with pytest.raises(ConfigError, match="max_completion_length"):
        opening.find(wrong, [])


def test_a_notebooks_server_waits_for_the_next_kernel(job, monkeypatch):
    assert "keep_server_s" not in opening.find("job.toml", [])[0].server
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert opening.find("job.toml", [])[0].server["keep_server_s"] == opening.KEEP_SERVER_S
    assert opening.find("job.toml", ["server.keep_server_s=5"])[0].server["keep_server_s"] == 5


RANKS = ["placement.trainer_ranks=2", "placement.mode=cpu"]


class Opened:
    """A session as far as opening goes."""

    is_open = True

    def __init__(self, found, placement, **how):
        self.ranks = placement.ranks
        self.how = how

    def check(self):
        pass

    def start(self):
        pass


def opened(**how):
    return opening.opened(Opened, None, RANKS, output_dir="runs", **how)  # type: ignore[type-var]


@pytest.fixture(autouse=True)
def _nothing_stays_open(monkeypatch):
    monkeypatch.setattr(opening, "_opened", {})


def test_a_run_that_trained_in_several_processes_can_be_asked_by_one(job):
    made("old", *RANKS)
    assert opened(run="old").ranks == 2


def test_a_new_run_that_trains_in_several_processes_needs_the_command_line(job):
    with pytest.raises(ConfigError, match=r"2 processes(.|\n)*scripts/train\.py"):
        opened(run="new")


def test_by_hand_no_run_is_trained_on_in_several_processes(job):
    found, source = opening.find("job.toml", [*RANKS, "grpo.per_device_train_batch_size=8"], run="old")
    session = Session(found, opening.place(found, source), source=source, by_hand=True)
    with pytest.raises(ConfigError, match=r"2 processes(.|\n)*--resume"):
        session.train()


def test_who_is_told_to_resume_a_run_elsewhere_is_told_where(job, tmp_path):
    settings = config.load(job, [f'output_dir="{tmp_path}"', "run=one"])
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError) as held:
        step_to_resume(settings, resume=False)
    with pytest.raises(BridgeError) as full, needing_room(settings):
        raise OSError(errno.ENOSPC, "full")
    for error in (held.value, full.value):
        assert f"--resume one --set output_dir={tmp_path}" in error.remedy


def test_a_session_that_has_refused_to_make_way_is_asked_to_the_next_time(job, monkeypatch):
    made("mine", *RANKS)
    earlier, asked = opened(run="mine"), []

    def make_way():
        asked.append(True)
        if len(asked) == 1:
            raise ConfigError("It is being trained.")

    monkeypatch.setattr(earlier, "make_way", make_way, raising=False)
    with pytest.raises(ConfigError, match="being trained"):
        opened(run="mine")
    assert opened(run="mine") is not earlier
    assert asked == [True, True]
