"""The report's page in a real browser that reaches nothing but the file: what it draws, and what it does when used."""

import json
import random
import re
import shutil
from itertools import pairwise

import pytest

from report_runs import metrics, sample, write_run
from trainer_env import cli
from trainer_env.report import page
from trainer_env.runs.records import Evaluation, StepMetrics
from trainer_env.runs.run_reader import read_run
from trainer_env.runs.tracking import Tracker

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LINES = """
    completion_length reward_std ratio_mean dlogp_mean_abs loss grad_norm learning_rate staleness generated_tokens_per_s
"""


PATIENCE_MS = 120_000


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser: {', '.join(BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
            timeout=PATIENCE_MS,
        )
        yield started
        started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of some runs. A test fails when the browser asks for more than the file, or complains."""
    contexts, complaints, asked = [], [], []

    def guard(route):
        asked.append(route.request.url)
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            route.abort()

    def open_page(*folders, **options):
        file = tmp_path / "page.html"
        file.write_bytes(page([read_run(folder) for folder in folders]))
        context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce", **options)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        context.route("**/*", guard)
        shown = context.new_page()
        shown.on("console", lambda message: complaints.append(message.text))
        shown.on("pageerror", lambda error: complaints.append(str(error)))
        shown.goto(file.as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert asked
    assert set(asked) == {(tmp_path / "page.html").as_uri()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "adding"
    write_run(folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others") / "slower"
    write_run(folder, "grpo.learning_rate=1e-4", steps=24, seed=1)
    return folder


def chart(shown, name):
    return shown.locator(f'[data-chart="{name}"]')


def paths(shown, name, look):
    return [path.get_attribute("d") for path in chart(shown, name).locator(f"svg.plot path.{look}").all()]


def points(path):
    """Places that a path goes through."""
    return re.findall(r"[ML]-?[\d.]+,-?[\d.]+", path)


def test_every_curve_is_there_with_a_point_for_each_step(show, run):
    shown = show(run)
    assert [len(points(path)) for path in paths(shown, "reward", "dots")] == [36]
    assert sorted(len(points(path)) for path in paths(shown, "reward", "line")) == [4, 36]
    (held_out,) = paths(shown, "reward", "markers")
    assert held_out.count("Z") == 4
    for name in LINES.split():
        assert [len(points(path)) for path in paths(shown, name, "line")] == [36], name
    assert [len(points(path)) for path in paths(shown, "publish_ms", "line")] == [36, 36]
    assert [path.count("Z") for path in paths(shown, "seconds", "area")] == [36, 36, 36]
    assert [path.count("Z") for look in ("agrees", "inconclusive") for path in paths(shown, "proof", look)] == [33, 3]
    assert shown.locator(".missing").inner_text() == "Without figures: Overlap."
    ticks = chart(shown, "reward").locator("svg.plot text").all_text_contents()
    assert {"0", "10", "20", "30"} <= set(ticks)


def test_a_curve_has_its_values_where_they_belong(show, run):
    shown = show(run)
    (path,) = paths(shown, "learning_rate", "line")
    places = [tuple(map(float, point[1:].split(","))) for point in points(path)]
    steps = [later[0] - first[0] for first, later in pairwise(places)]
    falls = [later[1] - first[1] for first, later in pairwise(places)]
    assert max(steps) == pytest.approx(min(steps), abs=0.05)
    assert min(steps) > 5
    assert max(falls) == pytest.approx(min(falls), abs=0.05)  # A linear schedule; down is up in SVG.
    assert min(falls) > 1


def test_pointing_at_a_curve_says_the_exact_value(show, run):
    shown = show(run)
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    plot = chart(shown, "grad_norm").locator("svg.plot")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
    tip = chart(shown, "grad_norm").locator(".tip")
    step = int(tip.locator("b").inner_text().removeprefix("Step "))
    assert 12 < step < 24
    assert float(tip.locator("i").inner_text()) == pytest.approx(recorded[step - 1]["grad_norm"], rel=1e-5)
    for name in ("reward", "loss", "seconds", "proof"):  # Every chart marks the step, one says its values.
        assert chart(shown, name).locator(".cross").count() == 1
        assert not chart(shown, name).locator(".tip").is_visible()
    plot.press("ArrowRight")
    assert tip.locator("b").inner_text() == f"Step {step + 1}"
    shown.mouse.move(5, 5)
    assert not tip.is_visible()


def test_nulls_are_gaps(show, tmp_path):
    folder = tmp_path / "gaps"
    run = Tracker(folder, 6, display="none")
    for step, loss in enumerate([1.0, 2.0, None, 1.5, None, 1.0], start=1):
        run.step(StepMetrics(step=step, version=step, loss=loss))
    run.close()
    shown = show(folder)
    (path,) = paths(shown, "loss", "line")
    assert len(points(path)) == 4
    assert path.count("M") == 3
    assert "Reward" in shown.locator(".missing").inner_text()
    plot = chart(shown, "loss").locator("svg.plot")
    plot.focus()
    for _ in range(3):
        plot.press("ArrowRight")
    assert chart(shown, "loss").locator(".tip").inner_text().split("\n") == ["Step 3", "no figure"]


def test_stepping_through_the_samples_changes_what_is_shown(show, run):
    shown = show(run)
    where, completions = shown.locator("#samples .where"), shown.locator("#samples .completion")
    assert where.inner_text() == "Step 0 · before training · 8 kept"
    assert completions.count() == 6
    shown.get_by_role("button", name="Show 2 more of 8").first.click()
    assert completions.count() == 8
    shown.get_by_role("button", name="Next").click()
    assert where.inner_text() == "Step 1 · training · 2 kept"
    assert {text.rpartition("(")[2] for text in completions.all_inner_texts()} == {"step 1)"}
    shown.keyboard.press("ArrowRight")
    assert {text.rpartition("(")[2] for text in completions.all_inner_texts()} == {"step 2)"}
    shown.locator("#samples").get_by_role("button", name="after training").click()
    assert where.inner_text() == "Step 36 · after training · 8 kept"
    shown.locator("#samples").get_by_role("button", name="training", exact=True).click()
    assert where.inner_text() == "Step 36 · training · 2 kept"
    slider = shown.locator("#samples input")
    slider.fill("9")
    assert where.inner_text() == "Step 10 · training · 2 kept"
    text = shown.locator("#samples .sample").first.inner_text()
    for part in ("0.00", "integer_answer 0", "length \u22120.25", "cut off: length", "version 9", "What is", "Answer"):
        assert part in text


def test_a_click_on_a_curve_shows_that_steps_samples(show, run):
    shown = show(run)
    plot = chart(shown, "loss").locator("svg.plot")
    box = plot.bounding_box()
    plot.click(position={"x": box["width"] - 5, "y": 50})
    assert shown.locator("#samples .where").inner_text() == "Step 36 · training · 2 kept"


def test_held_out_answers_stand_side_by_side(show, run):
    shown = show(run)
    place = shown.locator("#held-out")
    assert "8 better, 0 worse, 0 the same" in place.inner_text()
    for pair in place.locator(".pair").all():
        prompt, before, after = pair.locator(".text").all_inner_texts()
        one, other = map(int, re.findall(r"\d+", prompt))
        assert before == f"It may be {one} (step 0)"
        assert after == str(one + other)
    place.get_by_label("Right", exact=True).select_option("during training (step 12)")
    assert "0 better, 0 worse, 8 the same" in place.inner_text()
    assert "(step 12)" in place.locator(".completion").nth(1).inner_text()


def test_several_runs_are_overlaid_and_can_be_taken_away(show, run, other):
    shown = show(run, other)
    assert shown.locator("#legend button").all_inner_texts() == ["adding", "slower"]
    assert [len(points(path)) for path in paths(shown, "loss", "line")] == [36, 24]
    colours = {
        path.evaluate("path => getComputedStyle(path).stroke") for path in chart(shown, "loss").locator(".line").all()
    }
    assert len(colours) == 2
    assert shown.locator("#summary tbody tr").count() == 2
    differing = shown.locator("#differing tbody tr").all_inner_texts()
    assert [row.split("\t") for row in differing] == [
        ["grpo.max_steps", "36", "24"],
        ["grpo.learning_rate", "0.0003", "0.0001"],
    ]
    plot = chart(shown, "loss").locator("svg.plot")
    plot.hover(position={"x": 120, "y": 60})
    assert chart(shown, "loss").locator(".tip .dot").count() == 2
    shown.locator("#legend button").first.click()
    assert [len(points(path)) for path in paths(shown, "loss", "line")] == [24]
    assert not chart(shown, "seconds-0").is_visible()
    assert chart(shown, "seconds-1").is_visible()
    shown.locator("#samples").get_by_label("Run", exact=True).select_option("slower")
    shown.locator("#samples").get_by_role("button", name="after training").click()
    assert shown.locator("#samples .where").inner_text().startswith("Step 24 ")


def test_pass_at_k_is_drawn_where_it_was_measured(show, tmp_path):
    folder = tmp_path / "passing"
    run = Tracker(folder, 2, display="none")
    run.step(metrics(1, random.Random(0)))
    for step, rate in ((0, 0.25), (1, 0.5)):
        passed = {"1": rate, "4": rate * 2}
        run._evaluations_file.append(
            Evaluation(phase="eval", step=step, reward_mean=rate, examples=4, seconds=1, pass_at=passed)
        )
    run.close()
    shown = show(folder)
    assert chart(shown, "reward").locator(".keys span").all_inner_texts()[-2:] == ["pass@1", "pass@4"]
    assert len(paths(shown, "reward", "markers")) == 3
    plot = chart(shown, "reward").locator("svg.plot")
    plot.focus()
    plot.press("ArrowRight")
    assert chart(shown, "reward").locator(".tip i").all_inner_texts() == ["0.25", "0.25", "0.5"]


def test_hostile_text_is_shown_and_does_nothing(show, tmp_path):
    hostile = "</script><script>document.title='owned'</script><img src=http://127.0.0.1:1/x onerror=alert(1)>\x1b[31m"
    rng = random.Random(0)
    run = Tracker(tmp_path / "hostile", 2, display="none")
    run.step(
        metrics(1, rng),
        [sample("train", 1, rng, prompt=hostile, completion=hostile, answer=hostile, rewards={hostile: 1.0})],
    )
    run.close()
    shown = show(tmp_path / "hostile")
    assert shown.title() == "hostile · Tandem"
    assert shown.locator("img").count() == 0
    assert shown.locator(".sample .text").all_inner_texts() == [hostile.replace("\x1b", "␛")] * 3


def test_a_run_of_nothing_has_a_page(show, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.toml").touch()
    shown = show(folder)
    text = shown.locator("main").inner_text()
    for part in ("No optimizer step has been recorded yet.", "No samples were recorded.", "There is no config.toml."):
        assert part in text or part in shown.locator(".config").text_content()
    assert shown.locator(".chart").count() == 0


def test_a_thousand_steps_are_drawn_and_read_out(show, tmp_path):
    rng = random.Random(0)
    folder = tmp_path / "long"
    run = Tracker(folder, 1000, display="none")
    for step in range(1, 1001):
        run._metrics_file.append(metrics(step, rng))
    run.close()
    shown = show(folder)
    assert [len(points(path)) for path in paths(shown, "reward", "dots")] == [1000]
    plot = chart(shown, "reward").locator("svg.plot")
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] - 10, "y": 20})
    assert chart(shown, "reward").locator(".tip b").inner_text() == "Step 1,000"


def test_the_verdicts_of_a_long_run_are_counted_over_all_its_steps(show, tmp_path):
    folder = tmp_path / "long"
    run = Tracker(folder, 9000, display="none")
    run._metrics_file.keep(
        [
            StepMetrics(step=step, version=step, reward_mean=0.5, proof="disagrees" if step == 5000 else "agrees")
            for step in range(1, 9001)
        ]
    )
    run.close()
    shown = show(folder)
    assert [path.count("Z") for path in paths(shown, "proof", "disagrees")] == [1]
    legend = chart(shown, "proof").inner_text()
    assert "agrees 8,999" in legend or "agrees 8999" in legend
    assert "disagrees 1" in legend


def test_it_is_dark_for_those_who_like_it_and_fits_a_telephone(show, run):
    def ground(shown):
        return shown.evaluate("() => getComputedStyle(document.body).backgroundColor")

    light, dark = show(run, color_scheme="light"), show(run, color_scheme="dark")
    assert max(map(int, re.findall(r"\d+", ground(dark)))) < 60
    assert min(map(int, re.findall(r"\d+", ground(light)))) > 200
    dark.emulate_media(media="print", color_scheme="dark")
    assert dark.evaluate("() => getComputedStyle(document.documentElement).getPropertyValue('--ink')") == "#1c2126"
    assert ground(dark) == "rgb(255, 255, 255)"
    light.set_viewport_size({"width": 380, "height": 800})
    assert light.evaluate("() => document.documentElement.scrollWidth") <= 380
    light.wait_for_function("() => document.querySelector('svg.plot').viewBox.baseVal.width < 380")


def test_the_command_makes_a_page_that_opens(browser, run, tmp_path):
    out = tmp_path / "out.html"
    assert cli.main(["report", "adding", "--output-dir", str(run.parent), "--out", str(out)]) == 0
    shown = browser.new_page()
    shown.goto(out.as_uri())
    assert shown.locator("h1").inner_text() == "adding"
    assert shown.locator(".tile .value").all_inner_texts()[1:3] == ["0.00 → 1.00", "36"]
    shown.close()
