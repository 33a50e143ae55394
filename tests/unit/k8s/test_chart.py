"""What Helm and the schemas of Kubernetes say of the chart, and who may do what in it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence

import helm_python
import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

import paceline
from tests.unit.k8s import custom_resources
from tests.unit.k8s.chart import (
    CHART,
    NAMESPACE,
    RELEASE,
    TIERS,
    Document,
    Rendered,
    Values,
    component,
    render,
    values_files,
)
from tests.unit.k8s.conftest import EVERYTHING, OPTIONS, SETS
from tests.unit.k8s.custom_resources import is_custom

OLDEST = "1.32"
WARNING = 2


@pytest.mark.parametrize("name", sorted({**SETS, **OPTIONS}))
def test_helm_finds_nothing_to_complain_of(name: str) -> None:
    report = helm_python.lint(CHART, {**SETS, **OPTIONS}[name], strict=True)
    assert [message for message in report["messages"] if message["severity"] >= WARNING] == []
    assert report["errors"] == []


@pytest.fixture(scope="module")
def versions() -> Iterator[list[str]]:
    """Versions of Kubernetes whose schemas are here; each file of them is read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        patch.setattr(utils, "all_versions", functools.cache(utils.all_versions))
        found = [utils.major_minor(each) for each in utils.all_versions()]
        yield found[found.index(OLDEST) :]


def documents_of(*sets: Values) -> list[Document]:
    """All documents of some sets of values, equal ones once."""
    found = [each for values in sets for each in render(values).documents]
    return list({json.dumps(each, sort_keys=True): each for each in found}.values())


def pod_templates(documents: Sequence[Document]) -> list[Document]:
    """Templates of pods inside custom resources, each as a document of its own."""
    groups = [each["spec"]["leaderWorkerTemplate"] for each in documents if each["kind"] == "LeaderWorkerSet"]
    templates = [group[name] for group in groups for name in ("leaderTemplate", "workerTemplate")]
    head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "inside"}}
    return [{**head, "template": each} for each in templates]


def test_every_document_is_valid_for_every_version_of_kubernetes(versions: list[str]) -> None:
    documents = documents_of(*SETS.values(), *OPTIONS.values())
    own = [each for each in documents if not is_custom(each)]
    assert {each["kind"] for each in own} >= {"StatefulSet", "HorizontalPodAutoscaler", "Ingress", "NetworkPolicy"}
    inside = pod_templates(documents)
    assert len(inside) == 2
    for version in versions:
        for document in (*own, *inside):
            kubernetes_validate.validate(document, version, strict=True)


def test_every_custom_resource_is_as_its_project_defines_it() -> None:
    documents = [each for each in documents_of(*SETS.values(), *OPTIONS.values()) if is_custom(each)]
    for document in documents:
        custom_resources.validate(document)
    assert {each["kind"] for each in documents} == {path.stem for path in custom_resources.FOLDER.glob("*.json")}


def test_the_chart_is_of_the_version_of_the_package(defaults: Rendered) -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert metadata["appVersion"] == paceline.__version__
    image = defaults.container("gateway")["image"]
    assert image == f"paceline/gateway:{paceline.__version__}"


def test_pods_have_no_rights_a_read_only_root_and_no_variables_of_kubernetes(rendered: Rendered) -> None:
    for tier in rendered.workloads:
        spec, account = rendered.pod(tier)["spec"], rendered.named("ServiceAccount", tier)
        assert account["metadata"]["name"] == spec["serviceAccountName"]
        assert not spec["automountServiceAccountToken"]
        assert not account["automountServiceAccountToken"]
        # For a Service called paceline there would be PACELINE_PORT=tcp://..., which is a flag of ours.
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        fetching = [each for name, each in rendered.init_containers(tier).items() if name == "fetch"]
        for container in (rendered.container(tier), *fetching):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_every_mount_has_its_volume_and_every_volume_its_mount(rendered: Rendered) -> None:
    for tier in rendered.workloads:
        containers = [rendered.container(tier), *rendered.init_containers(tier).values()]
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts", ())}
        assert mounted == set(rendered.volumes(tier))


def test_only_verifiers_reach_drafters_and_only_gateways_reach_verifiers(rendered: Rendered) -> None:
    for tier, client in (("drafter", "verifier"), ("verifier", "gateway")):
        policy = rendered.named("NetworkPolicy", tier)["spec"]
        (rule,) = [each for each in policy["ingress"] if {"port": "grpc", "protocol": "TCP"} in each["ports"]]
        assert len(rule["ports"]) == 1
        (peer,) = rule["from"]
        assert set(peer) == {"podSelector"}
        assert component(peer["podSelector"]["matchLabels"]) == client
        metrics = {"port": "metrics", "protocol": "TCP"}
        scrapers = [each["from"] for each in policy["ingress"] if metrics in each["ports"]]
        # The console reads the metrics of verifiers. A rule that names nobody would let everybody in.
        assert all(scrapers)
        readers = {
            component(each["podSelector"]["matchLabels"])
            for peers in scrapers
            for each in peers[:1]
            if "podSelector" in each
        }
        assert readers == ({"gateway"} if tier == "verifier" else set())


def test_with_egress_shut_each_tier_reaches_names_the_store_and_the_tier_below_alone(everything: Rendered) -> None:
    reached: dict[str, set[str]] = {}
    for tier in (*TIERS, "redis"):
        policy = everything.named("NetworkPolicy", tier)["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        peers = [peer for rule in policy["egress"] for peer in rule.get("to", ())]
        reached[tier] = {component(peer["podSelector"]["matchLabels"]) for peer in peers}
        anywhere = [port["port"] for rule in policy["egress"] if "to" not in rule for port in rule["ports"]]
        assert anywhere == ([] if tier == "redis" else [53, 53, 443])
    store = {"redis"}
    assert reached == {
        "gateway": {"verifier"} | store,
        "verifier": {"drafter"} | store,
        "drafter": store,
        "redis": set(),
    }
    with pytest.raises(helm_python.HelmError, match=r"networkPolicy\.egress\.rules must open the way to the store"):
        render({"redis": {"secret": "store"}, "networkPolicy": {"egress": {"enabled": True}}})


def test_metrics_and_console_are_not_let_out(everything: Rendered) -> None:
    (ingress,) = everything.of_kind("Ingress")
    (route,) = render(OPTIONS["gateway api"]).of_kind("HTTPRoute")
    outside = [each["path"] for each in ingress["spec"]["rules"][0]["http"]["paths"]]
    assert outside == ["/v1", "/tokenize", "/detokenize"]
    assert [each["path"]["value"] for each in route["spec"]["rules"][0]["matches"]] == outside


def test_names_and_digests_are_those_of_the_values() -> None:
    digest = "sha256:" + 64 * "a"
    rendered = render({"fullnameOverride": "chat", "image": {"digest": {"verifier": digest}}})
    assert {each["metadata"]["name"] for each in rendered.of_kind("Deployment")} == {
        "chat-gateway",
        "chat-drafter",
        "chat-redis",
    }
    images = {tier: rendered.container(tier)["image"] for tier in TIERS}
    assert images["verifier"] == f"paceline/verifier:{paceline.__version__}@{digest}"
    assert "@" not in images["gateway"]


def test_the_overlay_for_production_leaves_nothing_open_that_the_notes_warn_of() -> None:
    production = values_files()["production"]
    with helm_python.Chart.load(CHART) as chart:
        told = {
            name: chart.render(values, name=RELEASE, namespace=NAMESPACE)[f"{chart.name}/templates/NOTES.txt"]
            for name, values in {"defaults": {}, "production": production}.items()
        }
    warnings = ("NO API KEYS", "NO TLS", "NO ALERTS", "NO PASSWORD")
    assert [each for each in warnings if each not in told["defaults"]] == []
    assert "NO " not in told["production"]
    assert "https://paceline.example.com/v1/models" in told["production"]


def test_an_autoscaled_tier_names_no_number_of_replicas(defaults: Rendered, everything: Rendered) -> None:
    """Otherwise every upgrade would undo what the autoscaler did."""
    assert all("replicas" not in everything.workloads[tier]["spec"] for tier in TIERS)
    assert all(defaults.workloads[tier]["spec"]["replicas"] == 1 for tier in TIERS)


def test_a_policy_with_clients_opens_the_doors_to_these_and_to_helms_test(everything: Rendered) -> None:
    door, metrics = everything.named("NetworkPolicy", "gateway")["spec"]["ingress"]
    tester, *clients = door["from"]
    assert component(tester["podSelector"]["matchLabels"]) == "test"
    assert clients == EVERYTHING["networkPolicy"]["clients"]
    assert [port["port"] for port in metrics["ports"]] == ["http"]


def test_a_pod_with_gpus_gets_one_or_as_many_as_its_limits_name(everything: Rendered) -> None:
    named = render({"verifier": {"gpu": True, "resources": {"limits": {"nvidia.com/gpu": 4}}}})
    asked = [each.container("verifier")["resources"]["limits"]["nvidia.com/gpu"] for each in (everything, named)]
    assert asked == [1, 4]
    assert "nvidia.com/gpu" not in everything.container("gateway")["resources"]["limits"]


def test_vllm_gets_its_arguments_as_they_are_written() -> None:
    arguments = ["--quantization=fp8", '--compilation-config={"level": 3, "cache_dir": "/tmp"}']
    verifier = {"engine": "vllm", "image": "vllm:1", "gpu": True, "vllmArgs": arguments}
    rendered = render({"verifier": verifier})
    container = rendered.container("verifier")
    assert container["image"] == "vllm:1"
    assert container["command"] == ["paceline", "verifier"]
    assert container["args"] == ["--engine=vllm", *(f"--vllm-arg={each}" for each in arguments)]


def test_simulated_devices_are_those_of_both_tiers_in_images_of_their_own() -> None:
    rendered = render({"simulate": "70b+1b@4xh100+l4", "verifier": {"replicas": 3}})
    for tier in ("verifier", "drafter"):
        container = rendered.container(tier)
        assert container["image"].startswith(f"paceline/{tier}-simulated:")
        assert container["args"] == ["--engine=simulated", "--profile=70b+1b@4xh100+l4"]
    assert rendered.container("gateway")["image"].startswith("paceline/gateway:")
    with pytest.raises(helm_python.HelmError, match=r"leave verifier\.engine at paceline"):
        render({"simulate": "70b+1b@4xh100+l4", "verifier": {"engine": "vllm"}})


def test_secrets_are_made_or_named_in_the_values(everything: Rendered) -> None:
    made = {secret["metadata"]["name"] for secret in everything.of_kind("Secret")}
    assert made == {"paceline-redis", "paceline-gateway-keys"}
    volumes = [volume for tier in TIERS for volume in everything.pod(tier)["spec"]["volumes"]]
    used = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert used - made == {"doors", *(f"paceline-{tier}-tls" for tier in TIERS)}


def test_an_external_store_replaces_the_one_in_the_chart() -> None:
    for redis in ({"url": "rediss://:secret@10.0.0.9:6379"}, {"secret": "store"}):
        rendered = render({"redis": redis})
        assert "redis" not in rendered.workloads
        assert not [each for each in rendered.of_kind("Service") if each["metadata"]["name"].endswith("redis")]
        (source,) = [
            entry["valueFrom"]["secretKeyRef"]["name"]
            for entry in rendered.container("gateway")["env"]
            if entry["name"] == "PACELINE_REDIS_URL"
        ]
        assert source == redis.get("secret", "paceline-redis")
    assert rendered.of_kind("Secret") == []
