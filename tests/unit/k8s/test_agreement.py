"""The chart against the services it starts: settings, ports, probes, metrics and images must be theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from paceline.cluster.drain import DrainConfig
from paceline.cluster.valkey import server_command
from paceline.gateway.api.auth import OPEN_PATHS
from paceline.obs.metrics import DrafterMetrics, VerifierMetrics
from paceline.service.config import load
from paceline.service.process import LIVENESS
from paceline.verifier.config import speculation_from
from paceline.verifier.vllm.settings import check_settings, decided
from paceline.vllm.settings import TESTED
from tests.unit.k8s.chart import K8S, RELEASE, TIERS, Rendered, component, render, values_files
from tests.unit.k8s.settings import CONFIG_OF, DRAIN_VARIABLES, known_variables

PREFIX = "PACELINE_"
SCALER = "HorizontalPodAutoscaler"
METRICS_OF = {"verifier": VerifierMetrics, "drafter": DrafterMetrics}


def settings_of(rendered: Rendered, tier: str) -> dict[str, str]:
    """The variables of a tier that are ours."""
    return {name: value for name, value in rendered.variables(tier).items() if name.startswith(PREFIX)}


def test_every_variable_is_a_setting_of_the_service(rendered: Rendered) -> None:
    for tier in TIERS:
        extra = set() if tier == "gateway" else DRAIN_VARIABLES
        assert set(settings_of(rendered, tier)) - extra <= known_variables(tier)


def test_a_service_starts_from_its_variables_alone(rendered: Rendered) -> None:
    for tier in TIERS:
        config: Any = load(CONFIG_OF[tier], [], settings_of(rendered, tier), "paceline", "")
        assert config.replica_id == f"{RELEASE}-{tier}-0"
        if tier == "verifier":
            speculation_from(config.speculative_config)


def test_settings_arrive_as_they_were_written(everything: Rendered) -> None:
    gateway: Any = load(CONFIG_OF["gateway"], [], settings_of(everything, "gateway"), "paceline", "")
    assert gateway.max_body_bytes == 8388608
    verifier: Any = load(CONFIG_OF["verifier"], [], settings_of(everything, "verifier"), "paceline", "")
    assert speculation_from(verifier.speculative_config).methods == ("draft_model", "ngram")
    assert verifier.announce == "[10.1.2.3]:8101"


def test_a_service_answers_at_the_ports_and_probes_of_its_pod(rendered: Rendered) -> None:
    for tier in ("verifier", "drafter"):
        config: Any = load(CONFIG_OF[tier], [], settings_of(rendered, tier), "paceline", "")
        container, ports = rendered.container(tier), rendered.ports(tier)
        assert ports == {"grpc": config.port, "metrics": config.metrics_port, "health": config.health_port}
        assert config.announce.endswith(f":{config.port}")
        # Health needs no certificate, and who is not ready is not dead.
        ready = {"port": ports["health"]}
        assert [container[kind]["grpc"] for kind in ("startupProbe", "readinessProbe")] == [ready, ready]
        assert container["livenessProbe"]["grpc"] == {**ready, "service": LIVENESS}
    gateway: Any = load(CONFIG_OF["gateway"], [], settings_of(rendered, "gateway"), "paceline", "")
    assert rendered.ports("gateway") == {"http": gateway.port, "grpc": gateway.grpc_port}
    for kind, path in (("readinessProbe", "/readyz"), ("livenessProbe", "/livez")):
        probe = rendered.container("gateway")[kind]["httpGet"]
        assert probe == {"path": path, "port": "http", "scheme": "HTTPS" if gateway.tls_cert else "HTTP"}
        assert path in OPEN_PATHS


def test_the_store_is_asked_for_an_answer_with_its_password(defaults: Rendered, everything: Rendered) -> None:
    """The second audit: a stopped Valkey still takes connections, so a probe by TCP never restarts it."""
    for rendered in (defaults, everything):
        container = rendered.container("redis")
        for kind in ("readinessProbe", "livenessProbe"):
            # With -e, a refusal for want of a password is a failure as well.
            assert container[kind]["exec"]["command"] == ["valkey-cli", "-e", "ping"]
        passwords = [entry["name"] for entry in container.get("env", ())]
        assert passwords == (["REDISCLI_AUTH"] if "--requirepass" in container["args"] else [])


def test_the_store_drives_nothing_out_neither_here_nor_under_up(defaults: Rendered) -> None:
    """The second audit: under volatile-lru, kept responses of one key drove out the counts and records of others."""
    own = server_command(Path("valkey-server"), host="127.0.0.1", port=1, data_dir=Path("/tmp"))
    for arguments in (defaults.container("redis")["args"], own):
        assert arguments[arguments.index("--maxmemory-policy") + 1] == "noeviction"
        assert arguments[arguments.index("--maxmemory") + 1].endswith("mb")


def test_kept_responses_leave_half_of_the_stores_memory_to_registry_records_and_counts(rendered: Rendered) -> None:
    if "redis" not in rendered.workloads:
        pytest.skip("the store is somebody else's")
    gateway: Any = load(CONFIG_OF["gateway"], [], settings_of(rendered, "gateway"), "paceline", "")
    arguments = rendered.container("redis")["args"]
    most_mb = int(arguments[arguments.index("--maxmemory") + 1].removesuffix("mb"))
    assert 2 * gateway.response_room_bytes <= most_mb << 20


def test_services_policies_and_budgets_choose_the_pods_of_their_tier_and_ports_of_these(rendered: Rendered) -> None:
    for document in rendered.of_kind("Service", "StatefulSet", "Deployment", "PodDisruptionBudget", "NetworkPolicy"):
        spec, kind = document["spec"], document["kind"]
        selector = spec.get("selector", spec.get("podSelector"))
        labels = selector.get("matchLabels", selector)
        chosen = [tier for tier in rendered.workloads if labels.items() <= pod_labels(rendered, tier).items()]
        assert chosen == [component(labels)]
        if kind == "NetworkPolicy":
            opened = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            assert opened <= set(rendered.ports(chosen[0])) - {"health"}
        for port in spec["ports"] if kind == "Service" else ():
            assert rendered.ports(chosen[0])[port["targetPort"]] == port["port"]


def test_a_pod_has_time_to_drain_and_to_end_its_streams(rendered: Rendered) -> None:
    for tier in TIERS:
        hook = rendered.container(tier)["lifecycle"]["preStop"]
        variables = settings_of(rendered, tier)
        if tier == "gateway":
            waits_s = hook["sleep"]["seconds"]
        else:
            program, subcommand, *flags = hook["exec"]["command"]
            drain = load(DrainConfig, flags, variables, "paceline drain", "")
            assert (program, subcommand, drain.replica) == ("paceline", "drain", f"{RELEASE}-{tier}-0")
            assert drain.redis_url == variables["PACELINE_REDIS_URL"]
            waits_s = drain.timeout_s
        needed_s = waits_s + float(variables.get("PACELINE_GRACE_S", 0))
        assert rendered.pod(tier)["spec"]["terminationGracePeriodSeconds"] > needed_s


def test_autoscalers_ask_for_what_the_adapter_makes_of_metrics_that_the_tier_has(everything: Rendered) -> None:
    rules = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    series_of = {rule["name"]["as"]: rule["seriesQuery"].partition("{")[0] for rule in rules}
    metrics = [each["pods"]["metric"]["name"] for each in everything.named(SCALER, "verifier")["spec"]["metrics"]]
    assert set(metrics) == set(series_of)
    assert set(series_of.values()) <= served_by("verifier")


def test_drafters_scale_by_what_the_adapter_makes_of_metrics_of_the_verifiers(everything: Rendered) -> None:
    (rule,) = yaml.safe_load((K8S / "prometheus-adapter.yaml").read_text())["rules"]["external"]
    (metric,) = everything.named(SCALER, "drafter")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    assert metric["external"]["target"] == {"type": "Value", "value": "200m"}
    asked = {re.sub("_total$|_count$", "", name) for name in re.findall(r"paceline:\w+", rule["metricsQuery"])}
    assert len(asked) == 2
    assert asked <= served_by("verifier")


def served_by(tier: str) -> set[str]:
    """Names of the metrics that a tier has."""
    registry = CollectorRegistry()
    METRICS_OF[tier](registry, "m")
    return {metric.name for metric in registry.collect()}


def test_each_image_is_a_target_of_the_dockerfile_and_shows_its_ports(rendered: Rendered) -> None:
    text = (K8S / "Dockerfile").read_text()
    for tier in TIERS:
        name = rendered.container(tier)["image"].split(":")[0].removeprefix("paceline/")
        assert name in (tier, f"{tier}-vllm", f"{tier}-simulated")
        stage = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
        assert stage is not None
        (exposed,) = re.findall(r"^EXPOSE (.*)$", stage[1], re.MULTILINE)
        assert {int(port) for port in exposed.split()} == set(rendered.ports(tier).values())
        assert f'ENTRYPOINT ["paceline", "{tier}"]' in stage[1]


def test_vllm_is_of_a_version_that_we_go_on_with_and_gets_no_setting_that_it_would_refuse() -> None:
    (image,) = re.findall(r"^ARG VLLM=\S+:v(\S+)$", (K8S / "Dockerfile").read_text(), re.MULTILINE)
    assert image in TESTED
    rendered = render(values_files()["vllm"])
    assert "--engine=vllm" in rendered.container("verifier")["args"]
    config: Any = load(CONFIG_OF["verifier"], [], settings_of(rendered, "verifier"), "paceline", "")
    check_settings(config)
    assert decided(config, on_cpu=False)["speculative_config"]["num_speculative_tokens"] == 7


def pod_labels(rendered: Rendered, tier: str) -> dict[str, str]:
    labels: dict[str, str] = rendered.pod(tier)["metadata"]["labels"]
    return labels
