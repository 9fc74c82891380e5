"""The merged /metrics page, our own figures, and the dashboard that shows them."""

import asyncio

import aiohttp
import pytest

from bridge import protocol as p
from bridge.errors import EngineFailed, StaleVersion
from fake_core import family
from metrics_reader import Page, figures
from server_env.engines.engine import EngineGone
from server_env.metrics import Metrics
from server_env.metrics.metrics_page import ENGINE_TIMEOUT_S, MetricsPage, merge

HISTOGRAM = """# HELP vllm:ttft_seconds Time to first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.1",model_name="a \\"b\\",engine="} 1.0
vllm:ttft_seconds_bucket{engine="0",le="+Inf",model_name="a \\"b\\",engine="} 2.0
vllm:ttft_seconds_count{engine="0",model_name="a \\"b\\",engine="} 2.0
vllm:ttft_seconds_sum{engine="0",model_name="a \\"b\\",engine="} 0.5
# HELP vllm:ttft_seconds_created Time to first token.
# TYPE vllm:ttft_seconds_created gauge
vllm:ttft_seconds_created{engine="0",model_name="a \\"b\\",engine="} 1.7e+09
"""


def test_an_engine_has_less_time_than_prometheus_waits_for_a_page():
    assert ENGINE_TIMEOUT_S < 10


class Native:
    """An engine as far as the page knows it: says a text, or is gone."""

    def __init__(self, text: str | None, status: int = 200) -> None:
        self._text, self.status = text, status

    def http(self):
        if self._text is None:
            raise EngineGone("not running")
        return self

    def get(self, route: str, timeout: aiohttp.ClientTimeout):
        assert route == "/metrics"
        assert timeout.total
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    async def text(self) -> str:
        assert self._text is not None
        return self._text


def page(*texts: str | None) -> str:
    engines = {str(index): Native(text) for index, text in enumerate(texts)}
    return asyncio.run(MetricsPage(lambda: "# TYPE own gauge\nown 1.0\n", engines).text())  # pyright: ignore[reportArgumentType]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_one_engines_figures_are_passed_on_as_they_are():
    assert page(HISTOGRAM) == HISTOGRAM + "# TYPE own gauge\nown 1.0\n"
    assert page(HISTOGRAM.rstrip()) == page(HISTOGRAM)


def test_several_engines_are_told_apart_and_each_family_is_described_once():
    first = family("vllm:tokens_total", "counter", 'engine="0"', 3) + HISTOGRAM
    second = family("vllm:tokens_total", "counter", 'engine="0"', 4) + family("vllm:more", "gauge", 'a="b"', 5)
    merged = Page(page(first, second))
    assert [merged.value("vllm:tokens_total", engine=label) for label in ("0", "1")] == [3, 4]
    assert merged.value("vllm:tokens_total", engine="1", exported_engine="0") == 4
    assert merged.value("vllm:more", engine="1", a="b") == 5
    assert merged.value("vllm:ttft_seconds_bucket", engine="0", le="0.1", model_name='a "b",engine=') == 1
    assert merged.value("own") == 1
    assert "# TYPE vllm:tokens_total counter\n" in merged.text
    assert "# TYPE vllm:ttft_seconds histogram\n" in merged.text


def test_an_engine_that_is_down_is_left_out_and_the_other_keeps_its_label():
    left = Page(page(None, family("vllm:more", "gauge", 'a="b"', 5)))
    assert left.value("vllm:more", engine="1") == 5
    assert Page(page(None, None)).names == Page(page(None)).names == {"own"}


def test_an_answer_that_is_no_page_is_left_out():
    engine = Native('{"detail":"Not Found"}', status=404)
    assert asyncio.run(MetricsPage(lambda: "own 1.0\n", {"0": engine}).text()) == "own 1.0\n"  # pyright: ignore[reportArgumentType]


def test_merging_nothing_is_nothing():
    assert merge([("0", ""), ("1", "")]) == ""


# ---- our own figures -------------------------------------------------------------------------------------------------


def test_our_own_figures_are_valid_and_named_as_prometheus_names_things():
    own = Page(Metrics(figures).text())
    assert all(name.startswith("tandem_") for name in own.names)
    assert not any(name.endswith("_created") for name in own.names)
    assert own.value("tandem_adapter_version") == 5
    assert own.value("tandem_adapter_versions_loaded") == 2
    assert own.value("tandem_generated_tokens_total") == 70
    assert own.value("tandem_dropped_frames_total") == 6
    assert own.value("tandem_requests_waiting", reason="version") == 1
    assert [own.value("tandem_engine_ready", engine=e) for e in ("0", "1")] == [1, 0]
    assert [own.value("tandem_engine_restarts_total", engine=e) for e in ("0", "1")] == [0, 1]
    assert own.value("tandem_server_info", backend="vllm", engine_version="0.1", run="adding") == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (StaleVersion("old"), "stale-version"),
        (EngineFailed("dead"), "engine-failed"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("a bug"), "error"),
    ],
)
def test_a_request_is_counted_by_how_it_ended_and_timed_only_when_answered(error, outcome):
    metrics = Metrics(figures)
    with pytest.raises(type(error)), metrics.request(p.Generate):
        raise error
    with metrics.request(p.Generate):
        pass
    own = Page(metrics.text())
    assert own.value("tandem_requests_total", kind="generate", outcome=outcome) == 1
    assert own.value("tandem_requests_total", kind="generate", outcome="ok") == 1
    assert own.value("tandem_request_seconds_count", kind="generate") == 1


def test_heartbeats_are_not_counted():
    metrics = Metrics(figures)
    with metrics.request(p.Ping):
        pass
    assert Page(metrics.text()).value("tandem_requests_total") == 0


def test_proofs_are_counted_by_outcome_and_timed():
    metrics = Metrics(figures)
    metrics.proved("agrees", 0.25)
    own = Page(metrics.text())
    assert own.value("tandem_proofs_total", outcome="agrees") == 1
    assert own.value("tandem_proofs_total", outcome="disagrees") == 0
    assert own.value("tandem_proof_seconds_sum") == 0.25


def test_two_servers_of_one_process_do_not_share_figures():
    first, second = Metrics(figures), Metrics(figures)
    first.proved("agrees", 1)
    assert Page(second.text()).value("tandem_proofs_total") == 0
