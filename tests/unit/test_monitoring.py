"""The monitoring example and the table of metrics name what is really there."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import yaml

import fake_sglang
import fake_vllm
from fake_core import Fake
from metrics_reader import Page, figures
from monitoring import FOLDER, dashboard, named, shown
from served import ROOT
from server_env.metrics import Metrics

OPERATIONS = ROOT / "docs" / "operations.md"


@pytest.fixture(scope="module")
def ours() -> Page:
    return Page(Metrics(figures).text())


@pytest.fixture(scope="module")
def engines() -> set[str]:
    """Names that the fake engines know; tests/engines holds the dashboard to the real ones."""
    names = set()
    for module, kind in ((fake_vllm, Fake), (fake_sglang, fake_sglang.FakeSGLang)):
        request = SimpleNamespace(app={"fake": kind(512, 8, 8, {})})
        answer = asyncio.run(module.metrics(request))  # pyright: ignore[reportArgumentType]
        names |= Page(answer.text or "").names
    return names


def families(page: Page) -> set[str]:
    """What a page's figures are called in a table: a histogram by one name."""
    histograms = {name.removesuffix("_bucket") for name in page.names if name.endswith("_bucket")}
    parts = {f"{name}_{part}" for name in histograms for part in ("bucket", "count", "sum")}
    return (page.names - parts) | histograms


def test_the_dashboard_shows_only_figures_that_there_are(ours, engines):
    assert shown("tandem_")
    assert shown("tandem_") <= ours.names
    assert shown("vllm:") <= engines
    assert shown("sglang:") <= engines


def test_the_dashboard_shows_both_engines_load_and_cache():
    assert {"vllm:kv_cache_usage_perc", "vllm:num_requests_running"} <= shown("vllm:")
    assert {"sglang:token_usage", "sglang:num_running_reqs"} <= shown("sglang:")


def test_the_table_has_every_figure_of_ours_and_no_other(ours, engines):
    text = OPERATIONS.read_text()
    assert named(text, ["tandem_"]) == families(ours)
    assert named(text, ["vllm:", "sglang:"]) == engines


def test_the_dashboard_is_one_that_grafana_can_be_given():
    board = dashboard()
    assert board["uid"]
    assert "id" not in board
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH")[: len(panel["targets"])]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all('{instance=~"$instance"}' in target["expr"] for target in panel["targets"])
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


def test_prometheus_grafana_and_the_documentation_mean_the_same_addresses():
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    assert scraped == ["127.0.0.1:9400"]
    for page in (FOLDER / "README.md", ROOT / "README.md"):
        assert f"server.metrics_address={scraped[0]}" in page.read_text()
    services = yaml.safe_load((FOLDER / "compose.yml").read_text())["services"]
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://127.0.0.1:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "tandem.yml").read_text())["providers"]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in services["grafana"]["volumes"]
