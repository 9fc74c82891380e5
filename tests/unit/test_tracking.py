"""What is kept of a run, and how it is shown."""

import contextlib
import io
import json
import math
import resource
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from bridge.errors import BridgeError, ConfigError
from trainer_env.config import EvaluationConfig
from trainer_env.display import LiveTable, PlainLines, Silent, TimeLeft, comparison, duration, ending, open_display
from trainer_env.display.plot import moving_mean, plot_rewards
from trainer_env.evaluation import best_adapter
from trainer_env.runs import tracking
from trainer_env.runs.jsonl import JsonLines, write_atomically
from trainer_env.runs.records import Best, Evaluation, Phase, Sample, StepMetrics
from trainer_env.runs.tracking import Tracker, spread

FIELDS = """
    step version staleness reward_mean reward_std loss learning_rate ratio_mean dlogp_mean_abs grad_norm
    completion_length rollout_s train_s publish_ms load_ms proof proof_ms overlap sleep_s wake_s
    freed_bytes generated_tokens generated_tokens_per_s wall_s
"""
SUMMARY = """
    backend placement steps reward_first4 reward_last4 eval_before eval_after wall_s adapter restarts
    best_step best_reward stopped_early proof
"""


def metrics(step, reward=0.5, **figures):
    return StepMetrics(step=step, version=step, reward_mean=reward, **figures)


def sample(phase: Phase = "train", step=1, reward=0.5, prompt="p", completion="c"):
    return Sample(phase=phase, step=step, version=step, prompt=prompt, completion=completion, reward=reward)


def tracker(folder, **settings):
    return Tracker(folder, 8, display="none", **settings)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def finish(run):
    return run.finish(backend="vllm", placement="cpu", adapter=run.run_dir / "adapter", restarts=1)


def test_a_step_is_one_line_with_every_field(tmp_path):
    run = tracker(tmp_path)
    run.step(metrics(1, loss=math.nan, proof="agrees", freed_bytes=7))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert list(line) == FIELDS.split()
    assert (line["step"], line["loss"], line["proof"], line["sleep_s"]) == (1, None, "agrees", None)


def test_the_summary_has_every_field(tmp_path):
    run = tracker(tmp_path)
    run.evaluation("eval_before", 0, [sample("eval_before", 0, 0.1), sample("eval_before", 0, 0.3)], 1.5)
    for step in range(1, 9):
        run.step(metrics(step, reward=step / 10, proof="inconclusive" if step < 3 else "agrees"))
    run.evaluation("eval", 4, [sample("eval", 4, 0.4)], 1.5)
    run.evaluation("eval_after", 8, [sample("eval_after", 8, 0.9)], 1.5)
    summary = finish(run)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == SUMMARY.split()
    assert written["reward_first4"] == pytest.approx(0.25)
    assert written["reward_last4"] == pytest.approx(0.65)
    assert written["proof"] == {"inconclusive": 2, "agrees": 6}
    assert (summary.eval_before, summary.eval_after) == (pytest.approx(0.2), 0.9)
    assert (summary.steps, summary.restarts, summary.backend) == (8, 1, "vllm")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_ends_with_a_summary_too(tmp_path):
    summary = finish(tracker(tmp_path))
    assert (summary.steps, summary.reward_first4, summary.eval_before) == (0, None, None)
    assert not (tmp_path / "reward.png").exists()
    assert "plot" not in dict(ending(summary, tmp_path))


def test_samples_go_from_the_worst_to_the_best(tmp_path):
    run = tracker(tmp_path, samples_per_step=3)
    run.step(metrics(1), [sample(reward=reward) for reward in (0.9, 0.1, 0.5, 0.2, 0.6)])
    assert [line["reward"] for line in lines(tmp_path / "samples.jsonl")] == [0.1, 0.5, 0.9]
    for count in range(7):
        assert len(spread([sample(reward=reward) for reward in (3, 1, 2, 4, 5)], count)) == min(count, 5)


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    run = tracker(tmp_path)
    run.evaluation("eval_before", 0, [sample("eval_before", 0, 0.1)], 1)
    for step in range(1, 7):
        run.step(metrics(step, reward=step), [sample(step=step)])
    run.evaluation("eval_after", 6, [sample("eval_after", 6, 0.2)], 1)
    run.close()

    again = tracker(tmp_path, resume_step=4)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert {line["step"] for line in lines(tmp_path / "samples.jsonl")} == {0, 1, 2, 3, 4}
    for step in range(5, 9):
        again.step(metrics(step, reward=step))
    again.evaluation("eval_after", 8, [sample("eval_after", 8, 0.9)], 1)
    summary = finish(again)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 9))
    assert (summary.steps, summary.reward_first4, summary.reward_last4) == (8, 2.5, 6.5)
    assert (summary.eval_before, summary.eval_after) == (0.1, 0.9)


def answers(step, *rewards, phase: Phase = "eval", prompts=("p", "q")):
    """The same rewards for each prompt."""
    return [sample(phase, step, reward, prompt=prompt) for prompt in prompts for reward in rewards]


def test_an_evaluation_of_several_answers_says_how_many_and_what_they_come_to(tmp_path):
    run = tracker(tmp_path)
    chances = {"1": 0.25, "2": 0.5}
    run.evaluation("eval", 4, answers(4, 0.0, 0.5), 1.5, num_generations=2, temperature=0.7, pass_at=chances)
    (line,) = lines(tmp_path / "evaluations.jsonl")
    expected = {"phase": "eval", "step": 4, "reward_mean": 0.25, "examples": 2, "seconds": 1.5}
    assert line == expected | {"num_generations": 2, "temperature": 0.7, "pass_at": chances}


def test_of_many_answers_the_first_to_each_example_is_kept(tmp_path):
    run = tracker(tmp_path)
    run.evaluation("eval", 1, answers(1, *[0.0] * 128), 1, num_generations=128)
    assert len(lines(tmp_path / "samples.jsonl")) == 256
    run.evaluation("eval", 2, answers(2, 1.0, *[0.0] * 128), 1, num_generations=129)
    kept = [line for line in lines(tmp_path / "samples.jsonl") if line["step"] == 2]
    assert [(line["prompt"], line["reward"]) for line in kept] == [("p", 1.0), ("q", 1.0)]
    run.evaluation("eval", 3, [sample("eval", 3)] * 300, 1)
    assert len(lines(tmp_path / "samples.jsonl")) == 256 + 2 + 300


def evaluated(run, step, reward, phase: Phase = "eval"):
    """As a session does it, with a file for the adapter."""
    if run.held_out.note(run.evaluation(phase, step, [sample(phase, step, reward)], 1)):
        folder = run.run_dir / "best"
        folder.mkdir(exist_ok=True)
        (folder / "best.json").write_bytes(msgspec.json.encode(run.held_out.best))


def test_the_summary_names_the_best_adapter_and_an_early_end(tmp_path):
    run = tracker(tmp_path, evaluation=EvaluationConfig(every=1, early_stopping_patience=2))
    for step, reward in enumerate([0.2, 0.6, 0.5, 0.6], 1):
        run.step(metrics(step))
        evaluated(run, step, reward)
    summary = finish(run)
    assert (summary.best_step, summary.best_reward, summary.stopped_early) == (2, 0.6, True)
    assert json.loads((tmp_path / "summary.json").read_text())["stopped_early"] is True


def test_a_run_that_took_all_its_steps_did_not_end_early(tmp_path):
    run = tracker(tmp_path, evaluation=EvaluationConfig(every=1, early_stopping_patience=1))
    for step in range(1, 9):
        run.step(metrics(step))
        evaluated(run, step, 0.5)
    summary = finish(run)
    assert (summary.best_step, summary.stopped_early) == (1, False)


def test_resume_takes_back_the_patience_that_came_after_the_checkpoint_and_no_adapter(tmp_path):
    settings = EvaluationConfig(every=1, early_stopping_patience=3)
    run = tracker(tmp_path, evaluation=settings)
    for step, reward in enumerate([0.4, 0.3, 0.6], 1):
        run.step(metrics(step))
        evaluated(run, step, reward)
    run.close()

    same = tracker(tmp_path, resume_step=3, evaluation=settings)
    assert same.held_out.best
    assert (same.held_out.best.step, same.held_out.bar, same.held_out.without) == (3, 0.6, 0)
    same.close()
    back = tracker(tmp_path, resume_step=2, evaluation=settings)
    assert back.held_out.best
    assert (back.held_out.best.step, back.held_out.bar, back.held_out.without) == (3, 0.4, 1)
    for step, reward in ((3, 0.35), (4, 0.4)):
        back.step(metrics(step))
        evaluated(back, step, reward)
    assert back.held_out.enough
    summary = finish(back)
    assert (summary.best_step, summary.best_reward) == (3, 0.6)  # Of the step 3 that was taken first.
    assert best_adapter.read(tmp_path) == Best(step=3, reward_mean=0.6, version=3)


def test_time_and_restarts_are_those_of_all_processes(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=lambda: now))
    first = tracker(tmp_path)
    for step in (1, 2, 3):
        now += 100
        first.step(metrics(step))
    first.close()  # It was killed later in step 4, and the last checkpoint is of step 2.
    now += 1000
    second = tracker(tmp_path, resume_step=2)
    now += 50
    second.step(metrics(3))
    now += 5
    assert (finish(second).wall_s, finish(second).restarts) == (355, 1)
    second.close()
    third = tracker(tmp_path, resume_step=3)
    now += 20
    third.step(metrics(4))
    assert [step.wall_s for step in third.steps] == [100, 200, 350, 375]
    assert (finish(third).wall_s, finish(third).restarts) == (375, 2)


def test_resume_from_the_end_measures_the_end_again(tmp_path):
    run = tracker(tmp_path)
    run.step(metrics(1))
    run.evaluation("eval_after", 1, [sample("eval_after", 1, 0.2)], 1)
    run.close()
    assert tracker(tmp_path, resume_step=1).evaluations == []


def test_a_new_run_does_not_overwrite_an_old_one(tmp_path):
    run = tracker(tmp_path)
    run.step(metrics(1))
    run.close()
    with pytest.raises(ConfigError, match=r"already holds a run[^\0]*--set output_dir="):
        tracker(tmp_path)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_torn_line_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = JsonLines(path, StepMetrics)
    file.append(metrics(1))
    with path.open("ab") as torn:
        torn.write(b'{"step":2,"ver')
    file.close()
    file = JsonLines(path, StepMetrics)
    file.append(metrics(2))
    assert [record.step for record in file.read()] == [1, 2]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = """
        import os, sys
        from pathlib import Path
        from trainer_env.runs.jsonl import JsonLines
        from trainer_env.runs.records import StepMetrics
        file = JsonLines(Path(sys.argv[1]), StepMetrics)
        for step in range(1, 4):
            file.append(StepMetrics(step=step, version=step))
        os.kill(os.getpid(), 9)
    """
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False, timeout=60)
    assert done.returncode == -9
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_full_disk_is_named_and_leaves_the_file_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = JsonLines(path, StepMetrics)
    file.append(metrics(1))
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        with pytest.raises(BridgeError, match=r"metrics\.jsonl cannot be written: File too large"):
            file.append(metrics(2))
        with pytest.raises(BridgeError, match=r"summary\.json cannot be written"):
            write_atomically(tmp_path / "summary.json", b"x" * (size + 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == size
    assert list(tmp_path.iterdir()) == [path]
    file.append(metrics(2))
    assert [record.step for record in file.read()] == [1, 2]


def test_a_file_of_something_else_is_named_with_its_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "version": 1}\n{"foo": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        tracker(tmp_path, resume_step=1)


def text_on(screen):
    return screen.file.getvalue()


def console(*, terminal=False):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, color_system=None)


def show(display):
    display.status("starting vLLM")
    display.note("metrics: curl …/metrics")
    display.evaluation(Evaluation(phase="eval_before", step=0, reward_mean=0.25, examples=16, seconds=1))
    for step in (1, 2):
        display.step(metrics(step, rollout_s=3.14, train_s=2, publish_ms=74, generated_tokens_per_s=1412))


def test_without_a_terminal_a_step_is_a_line():
    screen = console()
    show(PlainLines(24, screen))
    first, note, evaluation, *steps = text_on(screen).splitlines()
    assert (first, note) == ("starting vLLM", "metrics: curl …/metrics")
    assert evaluation == "evaluation before training: reward 0.25 on 16 held-out examples"
    assert len(steps) == 2
    for part in ("step  1/24", "reward 0.50", "tokens/s 1,412", "rollout 3.1s", "train 2.0s", "publish 74ms", "left "):
        assert part in steps[0]


def test_several_answers_to_each_example_show_pass_at_k():
    screen = console()
    record = Evaluation(
        phase="eval",
        step=8,
        reward_mean=0.42,
        examples=16,
        seconds=1,
        num_generations=4,
        temperature=1.0,
        pass_at={"1": 0.4, "2": 0.55, "4": 0.8},
    )
    PlainLines(24, screen).evaluation(record)
    assert text_on(screen) == (
        "evaluation step 8: reward 0.42 on 16 held-out examples x 4 answers, pass@1 0.40, pass@2 0.55, pass@4 0.80\n"
    )


def test_in_a_terminal_a_table_is_redrawn():
    screen = console(terminal=True)
    display = LiveTable(24, screen)
    try:
        show(display)
    finally:
        display.close()
    text = text_on(screen)
    for part in (
        "reward",
        "tokens/s",
        "2/24",
        "1,412",
        "left",
        "metrics: curl …/metrics",
        "evaluation before training",
    ):
        assert part in text
    assert text.endswith("\x1b[?25h")


def test_the_kind_of_display_follows_the_terminal():
    assert isinstance(open_display("auto", 3, console()), PlainLines)
    assert isinstance(open_display("none", 3, console()), Silent)
    live = open_display("auto", 3, console(terminal=True))
    live.close()
    assert isinstance(live, LiveTable)
    assert isinstance(open_display("plain", 3, console(terminal=True)), PlainLines)


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_the_display_keeps_the_terminal_while_other_output_is_sent_elsewhere(mode, monkeypatch):
    terminal, log = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    display = open_display(mode, 24)
    try:
        with contextlib.redirect_stdout(log):
            show(display)
    finally:
        display.close()
    assert sys.stdout is terminal
    assert "1,412" in terminal.getvalue()
    assert log.getvalue() == ""


def test_the_ending_compares_before_and_after(tmp_path):
    screen = console()
    run = Tracker(tmp_path, 4, display=PlainLines(4, screen))
    run.evaluation("eval_before", 0, [sample("eval_before", 0, 0.2, prompt="2+3?", completion="[bold]23")], 1)
    run.step(metrics(1))
    run.evaluation("eval_after", 1, [sample("eval_after", 1, 1.0, prompt="2+3?", completion="5")], 1)
    finish(run)
    text = text_on(screen)
    for part in ("2+3?", "[bold]23", "0.20 → 1.00", str(tmp_path / "adapter"), str(tmp_path / "reward.png")):
        assert part in text


def test_the_ending_names_the_best_adapter_and_why_training_ended(tmp_path):
    screen = console()
    settings = EvaluationConfig(every=1, early_stopping_patience=1)
    run = Tracker(tmp_path, 4, display=PlainLines(4, screen), evaluation=settings)
    for step, reward in ((1, 0.7), (2, 0.6)):
        run.step(metrics(step))
        evaluated(run, step, reward)
    finish(run)
    text = text_on(screen)
    assert f"0.70 at step 1, kept in {tmp_path / 'best'}" in text
    assert "early, after step 2: the held-out examples' reward got no better" in text


def test_the_ending_says_in_how_many_steps_the_halves_disagreed(tmp_path):
    for proofs, said in ((("agrees", "disagrees", "inconclusive"), "in 1 of 3 steps"), (("agrees",), None)):
        screen = console()
        run = Tracker(tmp_path / str(len(proofs)), 4, display=PlainLines(4, screen))
        for step, proof in enumerate(proofs, 1):
            run.step(metrics(step, proof=proof))
        finish(run)
        text = text_on(screen)
        assert ("did not compute the same policy" in text) == (said is not None)
        assert (said or "") in text


def test_what_is_noted_in_a_cell_stays_whatever_is_evaluated_after_it(monkeypatch):
    drawn = []
    view = pytest.importorskip("trainer_env.display.notebook_view")
    handle = SimpleNamespace(update=lambda html: drawn.append(html.data))
    monkeypatch.setattr(view, "display", lambda *_, **__: handle)
    display = view.NotebookView(9)
    display.note("the halves disagree")
    for step in range(1, 8):
        display.step(metrics(step))
        display.evaluation(Evaluation(phase="eval", step=step, reward_mean=0.5, examples=1, seconds=1))
    assert "the halves disagree" in drawn[-1]
    assert ("evaluation step 7" in drawn[-1], "evaluation step 1" in drawn[-1]) == (True, False)


def test_the_comparison_shows_each_prompt_once():
    before = answers(0, 0.0, 0.9, prompts="pq")
    after = answers(4, 0.5, 0.1, prompts="pq")
    table = comparison(before, after)
    assert [str(cell) for cell in table.columns[0].cells] == ["p", "q"]
    assert [list(table.columns[place].cells) for place in (2, 4)] == [["0.00", "0.00"], ["0.50", "0.50"]]


def test_the_comparison_starts_with_what_changed_most():
    before = [sample(prompt=str(n), reward=0) for n in range(9)]
    after = [sample(prompt=str(n), reward=n / 10) for n in range(9)]
    table = comparison(before, after, count=3)
    assert [str(cell) for cell in table.columns[0].cells] == ["8", "7", "6"]


def test_the_comparison_keeps_a_long_text_short_and_shows_its_end():
    long = sample(prompt="p", completion="first\n" + "word " * 500 + "#### 42")
    (cell,) = comparison([long], [long]).columns[3].cells
    assert str(cell).startswith("first word")
    assert str(cell).endswith("#### 42")
    assert len(str(cell)) < 120


def test_time_left_forgets_a_slow_first_step():
    now = 0.0
    left = TimeLeft(10, lambda: now)
    now = 100.0
    assert left.step(1) == 900
    for step in range(2, 8):
        now += 2
        left.step(step)
    now += 2
    assert left.step(8) == 4
    now += 500
    left.start()
    now += 2
    assert left.step(9) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (3600, "1h00m"), (7620, "2h07m")]
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


def test_the_plot_takes_one_step_and_gaps(tmp_path):
    plot_rewards(tmp_path / "one.png", [metrics(1), StepMetrics(step=2, version=2)], [])
    assert (tmp_path / "one.png").stat().st_size > 5000
    assert moving_mean([1, 2, 3, 4, 5, 6], 4) == [1, 1.5, 2, 2.5, 3.5, 4.5]
