"""A small run with the real engine whose trainer is killed three times, and which goes on with the same server."""

from killing import kill_trainer
from runs import ROOT, TRAIN, scenario

STEPS = 16
SETTINGS = (
    *("grpo.save_steps=1", "evaluation.before=false", "evaluation.after=false"),
    *("server.cpu_kv_gib=1", "server.lease_s=300"),
)


@scenario
def small_run_killed(lab):
    output_dir = lab.folder / "small-run-killed" / "runs"
    words = [*TRAIN, "--config", str(ROOT / "configs" / "smoke.toml"), "--run", "run", "--steps", str(STEPS)]
    for setting in (f"output_dir={output_dir}", *SETTINGS):
        words += ["--set", setting]
    return kill_trainer(lab, lab.start(*words, output_dir=output_dir), (2, 5, 8), 0.5)


def test_it_ends_well_with_each_step_once(small_run_killed):
    *_, last = small_run_killed
    assert last.code == 0, last.report()
    assert last.steps == list(range(1, STEPS + 1))
    assert [step["version"] for step in last.metrics] == last.steps
    assert {step["staleness"] for step in last.metrics} == {0}
    assert last.summary["restarts"] == 0
    assert last.left == {}


def test_all_its_trainers_had_one_server_and_one_engine(small_run_killed):
    log = (small_run_killed[-1].run_dir / "engine.log").read_text()
    assert log.count("--- life 1:") == 1
    assert "--- life 2:" not in log
    assert [("going on with the server" in run.stdout) for run in small_run_killed] == [False, True, True, True]


def test_what_goes_on_agrees_with_its_server(small_run_killed):
    assert all(step["dlogp_mean_abs"] < 1e-3 for step in small_run_killed[-1].metrics)
