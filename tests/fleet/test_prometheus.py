"""Metrics of a real fleet as users and their tools read them: names, a real Prometheus, dashboard, alerts."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator

import httpx
import pytest
import yaml
from loadtest.client import run_batch
from loadtest.streams import Ask

from paceline.checkpoints.corpus import unseen_prompts
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from tests.support.fleet_runner import FleetRunner
from tests.support.prometheus import ALERTS, DASHBOARD, Prometheus, needs_prometheus, running_prometheus

pytestmark = pytest.mark.full

SPECULATION = {
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}',
}
CACHE = {"vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"}
SESSIONS = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"}
PROCESS = {"process_resident_memory_bytes", "process_cpu_seconds_total", "paceline:build_info", "paceline:replica_info"}
FATES = {f'paceline:draft_nodes_total{{fate="{fate}",source="draft_model"}}' for fate in ("accepted", "rejected")}
NAMES = {
    GATEWAY: SPECULATION
    | SESSIONS
    | PROCESS
    | {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        'vllm:request_success_total{finished_reason="length"}',
        'paceline:request_errors_total{type="OverloadedError"}',
        'paceline:failovers_total{reason="UnavailableError"}',
        'paceline:replicas{role="drafter"}',
        "paceline:store_up",
    },
    VERIFIER: SPECULATION
    | SESSIONS
    | CACHE
    | PROCESS
    | FATES
    | {
        'paceline:draft_nodes_total{fate="unverified",source="draft_model"}',
        "paceline:draft_round_trip_seconds_bucket",
        "paceline:round_hits_total",
        "paceline:round_misses_total",
        "paceline:gamma_bucket",
        "paceline:price",
        "paceline:step_seconds_bucket",
        'paceline:fallbacks_total{reason="drafter_silent"}',
        "paceline:drafter_lag_tokens",
        "paceline:drafter_verified_tokens_total",
        "paceline:drafter_accepted_tokens_total",
        "paceline:drafter_committed_tokens_total",
        "vllm:request_queue_time_seconds_bucket",
    },
    DRAFTER: CACHE
    | PROCESS
    | {
        "paceline:step_seconds_bucket",
        "paceline:drafter_lag_tokens",
        "paceline:drafter_sessions",
        "paceline:drafter_streams",
        "paceline:drafter_nodes_sent_total",
        "paceline:draft_seconds_total",
    },
}
# Alerts that say that something is missing: on a fleet that has it they must find it.
PRESENCE = {"PacelineNoGateway", "PacelineNoVerifier", "PacelineNoDrafter", "PacelineStoreDown", "PacelineEngineStuck"}
MOST_ROUNDS = 5
# Of one mode alone where the number of guesses is fixed, as here: there is no ratio.
MEASURED_NAME = "paceline:mode_tokens_per_second"
# Only with tracing on; only of sources that take time.
OPTIONAL_NAMES = {"paceline:source_seconds_total", "paceline:certificate_days_left"}


def alerts() -> dict[str, str]:
    """Expressions by name."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}


def dashboard_queries() -> dict[str, str]:
    """Expressions by panel and letter, as Grafana would send them."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return {
        f"{panel['title']} ({target['refId']})": re.sub(
            r"\$(namespace|model_name|replica_id)", ".*", target["expr"].replace("$__rate_interval", "1m")
        )
        for panel in panels
        for target in panel.get("targets", ())
    }


def metrics_address(runner: FleetRunner, role: str) -> str:
    endpoint = runner.fleet.endpoint(role)
    return endpoint.address if role == GATEWAY else endpoint.second_address


def stream_some(runner: FleetRunner, num_prompts: int) -> None:
    asks = [Ask(prompt=prompt, max_tokens=48, temperature=0.8) for prompt in unseen_prompts(num_prompts)]
    completions = asyncio.run(run_batch(runner.url, asks, 4, "streams")).completions
    assert [each.num_tokens for each in completions] == [48] * num_prompts


@pytest.mark.parametrize("role", NAMES)
def test_every_service_shows_the_names_that_users_know(chains: FleetRunner, role: str) -> None:
    # One alone drafts from its first step; not every text leaves guesses that no step has verified.
    missing = NAMES[role]
    for _ in range(MOST_ROUNDS):
        stream_some(chains, 1)
        stream_some(chains, 4)
        missing = NAMES[role] - names_shown(metrics_address(chains, role))
        if not missing:
            break
    assert missing == set()


def names_shown(address: str) -> set[str]:
    """Names of a page of metrics, with their labels and without."""
    page = httpx.get(f"http://{address}/metrics", trust_env=False).text
    named = [line.rpartition(" ")[0] for line in page.splitlines() if line[0] != "#"]
    samples = [re.sub(r',?model_name="[^"]*",?', "", name) for name in named]
    return {*samples, *(name.partition("{")[0] for name in samples)}


@pytest.fixture(scope="module")
def prometheus(chains: FleetRunner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has seen the fleet before, between and after two waves of completions."""
    targets = {role: metrics_address(chains, role) for role in NAMES}
    with running_prometheus(tmp_path_factory.mktemp("prometheus"), targets) as running:
        for num_prompts in (6, 12):
            running.until_scraped()
            stream_some(chains, num_prompts)
        running.until_scraped()
        yield running


@needs_prometheus
@pytest.mark.parametrize("panel", dashboard_queries())
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, panel: str) -> None:
    query = dashboard_queries()[panel]
    values = [float(sample["value"][1]) for sample in prometheus.query(query)]
    assert values or MEASURED_NAME in query
    assert all(map(math.isfinite, values)), values


@needs_prometheus
@pytest.mark.parametrize("alert", alerts())
def test_every_alert_can_be_asked_and_none_misses_what_is_there(prometheus: Prometheus, alert: str) -> None:
    raised = prometheus.query(alerts()[alert])
    assert alert not in PRESENCE or raised == []


@needs_prometheus
def test_prometheus_takes_every_rule(prometheus: Prometheus) -> None:
    prometheus.until(lambda: "unknown" not in {rule["health"] for rule in prometheus.rules()})
    assert {rule["name"] for rule in prometheus.rules() if rule["type"] == "alerting"} == alerts().keys()
    assert [rule["lastError"] for rule in prometheus.rules() if rule["health"] != "ok"] == []


@needs_prometheus
def test_dashboard_and_alerts_ask_for_nothing_that_nobody_shows(prometheus: Prometheus) -> None:
    text = " ".join([*alerts().values(), *dashboard_queries().values()])
    asked = set(re.findall(r"\b(?:(?:vllm|paceline):|process_)[a-z0-9_:]+\b", text))
    recorded = {rule["name"] for rule in prometheus.rules() if rule["type"] == "recording"}
    missing = {name for name in asked - recorded if not prometheus.query(name)}
    assert len(asked) > 40
    assert missing == OPTIONAL_NAMES
