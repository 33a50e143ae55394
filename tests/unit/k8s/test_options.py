"""What takes the place of the usual objects: KEDA, the Gateway API, several hosts; and what `helm test` runs."""

from __future__ import annotations

import helm_python
import pytest

from tests.unit.k8s.chart import CHART, NAMESPACE, RELEASE, TIERS, Document, Rendered, component, render
from tests.unit.k8s.conftest import OPTIONS

HPA = "HorizontalPodAutoscaler"


@pytest.fixture(scope="module")
def hosts() -> Rendered:
    return render(OPTIONS["several hosts"])


def group_of(rendered: Rendered) -> Document:
    (found,) = rendered.of_kind("LeaderWorkerSet")
    group: Document = found["spec"]["leaderWorkerTemplate"]
    return group


def test_keda_asks_for_the_series_of_the_usual_autoscalers_with_the_same_targets(everything: Rendered) -> None:
    scaled = {each["metadata"]["name"]: each["spec"] for each in render(OPTIONS["keda"]).of_kind("ScaledObject")}
    assert set(scaled) == {f"{RELEASE}-{tier}" for tier in TIERS}
    for tier in ("verifier", "drafter"):
        usual = everything.named(HPA, tier)["spec"]
        spec = scaled[f"{RELEASE}-{tier}"]
        assert spec["scaleTargetRef"] == usual["scaleTargetRef"]
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == usual["behavior"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (usual["minReplicas"], usual["maxReplicas"])
        for trigger, metric in zip(spec["triggers"], usual["metrics"], strict=True):
            asked = metric.get("pods") or metric["external"]
            series = asked["metric"]["name"].replace("_", ":", 1).removesuffix("_share")
            assert series in trigger["metadata"]["query"]
            assert trigger["metricType"] == asked["target"]["type"]
            target = asked["target"].get("averageValue") or asked["target"]["value"]
            assert quantity(target) == float(trigger["metadata"]["threshold"])


def test_a_route_leads_to_the_service_or_to_the_pool_of_gateways() -> None:
    def backend(values: Document) -> Document:
        (route,) = render(values).of_kind("HTTPRoute")
        (rule,) = route["spec"]["rules"]
        (found,) = rule["backendRefs"]
        backend: Document = found
        return backend

    options = OPTIONS["gateway api"]
    route = {"gateway": {"httpRoute": options["gateway"]["httpRoute"]}}
    assert backend(route) == {"name": "paceline-gateway", "port": 8000}
    assert backend(options)["kind"] == "InferencePool"
    rendered = render(options)
    pool = rendered.named("InferencePool", "gateway")["spec"]
    assert pool["selector"]["matchLabels"].items() <= rendered.pod("gateway")["metadata"]["labels"].items()
    assert [port["number"] for port in pool["targetPorts"]] == [rendered.ports("gateway")["http"]]


def test_a_target_on_several_hosts_has_one_verifier_and_lends_it_the_others(hosts: Rendered) -> None:
    group = group_of(hosts)
    assert group["size"] == 2
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    (worker,) = group["workerTemplate"]["spec"]["containers"]
    assert leader["command"][-2:] == ["paceline", "verifier"]
    assert "ray start --head" in leader["command"][2]
    assert "ray start --address" in worker["command"][2]
    assert leader["resources"] == worker["resources"]
    assert leader["volumeMounts"] == worker["volumeMounts"]
    assert "lifecycle" in leader
    assert not {"lifecycle", "readinessProbe", "startupProbe", "ports"} & set(worker)


def test_only_leaders_are_of_the_verifiers_service_and_hosts_reach_each_other(hosts: Rendered) -> None:
    labels = {name: group_of(hosts)[name]["metadata"]["labels"] for name in ("leaderTemplate", "workerTemplate")}
    selector = hosts.named("Service", "verifier")["spec"]["selector"]
    assert [name for name, each in labels.items() if selector.items() <= each.items()] == ["leaderTemplate"]

    def reached_by(tier: str, port: str) -> set[str]:
        rules = hosts.named("NetworkPolicy", tier)["spec"]["ingress"]
        ports = [(rule, {each["port"] for each in rule.get("ports", ({"port": port},))}) for rule in rules]
        peers = [peer for rule, opened in ports if port in opened for peer in rule["from"]]
        return {component(peer["podSelector"]["matchLabels"]) for peer in peers if "podSelector" in peer}

    assert reached_by("verifier", "ray") == {"verifier-host"}
    assert reached_by("verifier-host", "ray") == {"verifier", "verifier-host"}
    # The part of vLLM that asks drafters may lie on any host.
    assert reached_by("drafter", "grpc") == {"verifier", "verifier-host"}
    assert "verifier-host" in reached_by("redis", "redis")


def test_our_own_engine_is_refused_on_several_hosts() -> None:
    with pytest.raises(helm_python.HelmError, match=r"verifier\.hosts"):
        render({"verifier": {"hosts": 2}})


def test_helm_test_asks_the_gateway_for_the_model_that_users_ask_for(everything: Rendered) -> None:
    (pod,) = everything.of_kind("Pod")
    (container,) = pod["spec"]["containers"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables == {"URL": "https://paceline-gateway:8000", "MODEL": "demo"}
    assert container["args"] == [(CHART / "tests" / "completion.py").read_text()]
    assert container["image"] == everything.container("gateway")["image"]


def quantity(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def test_alerts_of_a_release_look_at_its_own_namespace_and_link_to_your_runbook() -> None:
    alerts = {"enabled": True, "runbookUrl": "https://wiki/operate"}
    (rule,) = render({"monitoring": {"alerts": alerts}}).of_kind("PrometheusRule")
    rules = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert [each for each in rules if f'namespace="{NAMESPACE}"' not in each["expr"]] == []
    assert 'namespace=~".*"' not in str(rules)
    links = {each["annotations"]["runbook_url"].partition("#")[0] for each in rules if "alert" in each}
    assert links == {"https://wiki/operate"}
