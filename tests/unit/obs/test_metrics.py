"""Metric names are an interface: dashboards and load clients read them."""

from __future__ import annotations

import re
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline.core.errors import ConfigError
from paceline.core.target_events import Reason, StepReport
from paceline.obs import metrics_page as module
from paceline.obs.metrics import (
    MOST_PAIRS,
    DrafterMetrics,
    GatewayMetrics,
    Meter,
    SpeculationTotals,
    VerifierMetrics,
    rows_label,
)
from paceline.obs.metrics_page import MAX_SCRAPES, metrics_server

VERIFIER_NAMES = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
    "paceline:sessions",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "paceline:draft_round_trip_seconds_count",
    'paceline:draft_nodes_total{fate="late",source="model"}',
    'paceline:source_seconds_total{source="medusa"}',
    'paceline:source_turns_total{source="medusa"}',
    "paceline:round_hits_total",
    "paceline:round_misses_total",
    "paceline:gamma_count",
    "paceline:price",
    'paceline:step_seconds_count{rows="8"}',
    'paceline:fallbacks_total{reason="link_lost"}',
    "paceline:drafter_lag_tokens",
}


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """Samples by name and labels, without the model's, which those have that vLLM has, too."""
    lines = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert all(('model_name="tiny"' in line) == line.startswith("vllm:") for line in lines)
    plain = [re.sub(r',?model_name="tiny",?', "", line).replace("{}", "") for line in lines]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in plain}


def test_a_verifier_has_the_agreed_names() -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry, "tiny")
    metrics.speculation.add_rounds(num_draft_tokens=4, num_accepted_tokens=[2])
    step = StepReport(num_rows=5, seconds=0.004)
    step.count("paceline:draft_nodes", "model", "late")
    step.count("paceline:source_seconds", "medusa", by=0.002)
    step.count("paceline:source_turns", "medusa", by=3)
    metrics.steps.add(step)
    assert samples(registry).keys() >= VERIFIER_NAMES


def test_a_verifier_shows_its_mode_its_reason_and_since_when_until_one_of_them_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry, "tiny")
    shown: list[dict[str, float]] = []
    steps = (("plain", Reason.TOO_LOADED), ("plain", Reason.TOO_LOADED), ("sources", Reason.TRYING), ("sources", None))
    for now_s, (mode, reason) in enumerate(steps, start=100):
        monkeypatch.setattr(time, "time", lambda now_s=now_s: float(now_s))
        metrics.steps.add(StepReport(num_rows=1, mode=mode, reason=reason))
        shown.append({name: value for name, value in samples(registry).items() if "mode_since" in name})
    plain = {'paceline:mode_since_seconds{mode="plain",reason="too_loaded"}': 100.0}
    trying = {'paceline:mode_since_seconds{mode="sources",reason="trying"}': 102.0}
    assert shown == [plain, plain, trying, trying]


def test_gateway_and_drafter_have_the_agreed_names() -> None:
    of_gateway, of_drafter = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(of_gateway, ["tiny"])
    DrafterMetrics(of_drafter, "tiny")
    stems = ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    assert {f"vllm:{stem}_seconds_count" for stem in stems} <= samples(of_gateway).keys()
    assert {"vllm:kv_cache_usage_perc", "paceline:drafter_lag_tokens"} <= samples(of_drafter).keys()


def test_sessions_and_rounds_count_the_same() -> None:
    by_round, by_session = CollectorRegistry(), CollectorRegistry()
    rounds = SpeculationTotals(Meter(by_round, "tiny"))
    rounds.add_rounds(num_draft_tokens=8, num_accepted_tokens=[0, 3])
    rounds.add_rounds(num_draft_tokens=0, num_accepted_tokens=[])
    rounds.add_rounds(num_draft_tokens=8, num_accepted_tokens=[1, 3])
    SpeculationTotals(Meter(by_session, "tiny")).add_session(num_draft_tokens=16, acceptance_histogram=(1, 1, 0, 2))
    counted = [
        {name: value for name, value in samples(registry).items() if "_created" not in name}
        for registry in (by_round, by_session)
    ]
    assert counted[0] == counted[1]
    assert counted[0]["vllm:spec_decode_num_accepted_tokens_total"] == 7
    assert counted[0]['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"}'] == 2


def test_tokens_and_the_drafters_time_have_the_same_labels_so_one_divides_by_the_other() -> None:
    of_verifier, of_drafter = CollectorRegistry(), CollectorRegistry()
    verifier, drafter = VerifierMetrics(of_verifier, "tiny"), DrafterMetrics(of_drafter, "tiny")
    verifier.tell_address("v:1")
    drafter.tell_address("d:1")
    step = StepReport()
    step.count("paceline:drafter_committed_tokens", "tiny", "d:1", by=5)
    verifier.steps.add(step)
    drafter.took("v:1", 0.25)
    labels = '{draft_model="tiny",drafter="d:1",verifier="v:1"}'
    assert samples(of_verifier)[f"paceline:drafter_committed_tokens_total{labels}"] == 5
    assert samples(of_drafter)[f"paceline:draft_seconds_total{labels}"] == 0.25


def test_of_peers_that_come_and_go_the_latest_alone_are_shown() -> None:
    registry = CollectorRegistry()
    metrics = DrafterMetrics(registry, "tiny")
    for number in (0, *range(MOST_PAIRS), 0, MOST_PAIRS):
        metrics.took(f"v:{number}", 1.0)
    shown = [name for name in samples(registry) if name.startswith("paceline:draft_seconds_total")]
    assert len(shown) == MOST_PAIRS
    assert not any('verifier="v:1"' in name for name in shown)
    assert sum('verifier="v:0"' in name for name in shown) == 1


@pytest.mark.parametrize("amount", [0.0, 0.001, 0.0011, 60.0, 61.0])
def test_equal_values_count_as_if_they_came_one_by_one(amount: float) -> None:
    alike, each = CollectorRegistry(), CollectorRegistry()
    GatewayMetrics(alike, ["tiny"]).of("tiny").inter_token_latency.observe_alike(amount, 3)
    histogram = GatewayMetrics(each, ["tiny"]).of("tiny").inter_token_latency
    for _ in range(3):
        histogram.observe(amount)
    assert samples(alike) == pytest.approx(samples(each))


@pytest.mark.parametrize(("num_rows", "label"), [(1, "1"), (2, "2"), (3, "4"), (512, "512"), (513, "more")])
def test_row_labels_are_few(num_rows: int, label: str) -> None:
    assert rows_label(num_rows) == label


def test_a_scraper_that_prefers_openmetrics_gets_our_names_all_the_same() -> None:
    registry = CollectorRegistry()
    GatewayMetrics(registry, ["tiny"])
    with metrics_server(registry, "127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        for accepted in ("*/*", "application/openmetrics-text;version=1.0.0,*/*;q=0.1"):
            request = urllib.request.Request(url, headers={"Accept": accepted})
            with urllib.request.urlopen(request, timeout=10) as response:
                assert b'\nvllm:generation_tokens_total{model_name="tiny"} 0.0' in response.read()


def test_connections_to_a_metrics_port_that_send_nothing_give_way_to_scrapes() -> None:
    """300 of them held 300 threads for ever."""
    with metrics_server(CollectorRegistry(), "127.0.0.1", 0) as port, ExitStack() as stack:
        silent = [stack.enter_context(silent_connection(port)) for _ in range(MAX_SCRAPES)]
        before = threading.active_count()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as scrape:
            assert scrape.status == 200
        silent += [stack.enter_context(silent_connection(port)) for _ in range(MAX_SCRAPES)]
        assert [each.recv(1) for each in silent[:MAX_SCRAPES]] == [b""] * MAX_SCRAPES
        assert threading.active_count() <= before + MAX_SCRAPES


def test_a_connection_to_a_metrics_port_on_which_nothing_moves_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCRAPE_SILENCE_S", 0.05)
    with metrics_server(CollectorRegistry(), "127.0.0.1", 0) as port, silent_connection(port) as silent:
        silent.send(b"GET /metr")
        assert silent.recv(1) == b""


def silent_connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def test_a_metrics_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--metrics-port"):
            with metrics_server(CollectorRegistry(), "127.0.0.1", port):
                pass


def test_a_gateway_counts_each_of_its_models_by_itself() -> None:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, ["one", "two"])
    metrics.of("one").generation_tokens.inc(3)
    metrics.of("two").request_success.labels("stop").inc()
    metrics.of("two").speculation.add_session(num_draft_tokens=2, acceptance_histogram=(0, 1))

    def told(name: str, model: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": model, **labels})

    assert [told("vllm:generation_tokens_total", model) for model in ("one", "two")] == [3, 0]
    assert [told("vllm:request_success_total", each, finished_reason="stop") for each in ("one", "two")] == [0, 1]
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [told(per_position, model, position="0") for model in ("one", "two")] == [None, 1]
