"""Where a tier's checkpoint comes from, who fetches it, and what values add to pods."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.commands import asked
from tests.unit.k8s.chart import TIERS, Document, Rendered, Values, component, render

HUB = "hf://Qwen/Qwen3-8B@1a2b3c"
CLAIM = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}
DEFAULT_USER = {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}


def weights_mount(container: Document) -> Document:
    (mount,) = [each for each in container["volumeMounts"] if each["mountPath"] == "/weights"]
    found: Document = mount
    return found


def model_of(rendered: Rendered, tier: str) -> str:
    return rendered.variables(tier)["PACELINE_MODEL"].removeprefix("demo=")


@pytest.fixture(scope="module")
def of_the_hub() -> Rendered:
    values: Values = {"target": HUB, "draft": "hf://Qwen/Qwen3-0.6B", "token": {"secret": "hub"}}
    return render({"model": values, "verifier": {"gpu": True, "resources": {"limits": {"nvidia.com/gpu": 4}}}})


@pytest.mark.parametrize("tier", TIERS)
def test_a_checkpoint_of_the_hub_is_fetched_first_by_the_one_container_with_token_and_network(
    of_the_hub: Rendered, tier: str
) -> None:
    source, service = model_of(of_the_hub, tier), of_the_hub.container(tier)
    (fetch,) = of_the_hub.init_containers(tier).values()
    assert fetch["image"] == service["image"]
    values = asked([*fetch["command"][1:], *fetch["args"]]).values
    assert (values.name, values.tokenizer_only) == (source, tier == "gateway")
    assert "readOnly" not in weights_mount(fetch)
    assert weights_mount(service)["readOnly"] is True
    variables, served = {entry["name"]: entry for entry in fetch["env"]}, of_the_hub.variables(tier)
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "HF_TOKEN" not in served
    assert (served["HF_HUB_OFFLINE"], served["HF_HOME"]) == ("1", variables["HF_HOME"]["value"])
    assert "nvidia.com/gpu" not in fetch["resources"]["limits"]


def test_block_storage_is_kept_by_each_verifier_or_lives_with_its_pod() -> None:
    kept = render({"model": {"target": HUB}, "verifier": {"weights": {"claim": CLAIM}}})
    assert kept.volumes("verifier")["weights"]["spec"] == CLAIM
    assert "weights" not in {each["name"] for each in kept.pod("verifier")["spec"]["volumes"]}
    volume = {"ephemeral": {"volumeClaimTemplate": {"spec": CLAIM}}}
    short = render({"model": {"draft": HUB}, "drafter": {"weights": {"volume": volume}}})
    assert short.volumes("drafter")["weights"] == {"name": "weights", **volume}


@pytest.mark.parametrize(
    ("source", "model", "volume"),
    [
        ("pvc://disk/qwen/8B", "/weights/qwen/8B", {"persistentVolumeClaim": {"claimName": "disk", "readOnly": True}}),
        ("pvc://disk", "/weights", {"persistentVolumeClaim": {"claimName": "disk", "readOnly": True}}),
        ("image://host:5000/qwen:8b", "/weights", {"image": {"reference": "host:5000/qwen:8b"}}),
        (
            "image://host/qwen@sha256:ab#models/8B",
            "/weights/models/8B",
            {"image": {"reference": "host/qwen@sha256:ab"}},
        ),
    ],
)
def test_a_claim_or_an_image_is_mounted_by_its_tier_alone(source: str, model: str, volume: Document) -> None:
    rendered = render({"model": {"target": source, "tokenizer": "/models/tokenizer"}})
    assert model_of(rendered, "verifier") == model
    mounted = rendered.volumes("verifier")["weights"]
    mounted.get("image", {}).pop("pullPolicy", None)
    assert mounted == {"name": "weights", **volume}
    assert rendered.init_containers("verifier") == {}
    assert all("weights" not in rendered.volumes(tier) for tier in ("gateway", "drafter"))
    assert model_of(rendered, "gateway") == "/models/tokenizer"


def test_openshift_takes_users_from_its_own_ranges(defaults: Rendered) -> None:
    nobody: dict[str, Any] = dict.fromkeys(DEFAULT_USER)
    everywhere, verifiers = render({"podSecurityContext": nobody}), render({"verifier": {"podSecurityContext": nobody}})

    def users(rendered: Rendered, tier: str) -> dict[str, int]:
        security = rendered.pod(tier)["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        return {name: security[name] for name in DEFAULT_USER if name in security}

    for tier in (*TIERS, "redis"):
        assert users(defaults, tier) == DEFAULT_USER
        assert users(everywhere, tier) == {}
        assert users(verifiers, tier) == ({} if tier == "verifier" else DEFAULT_USER)


def test_pods_carry_what_the_values_add(everything: Rendered) -> None:
    assert everything.pod("verifier")["metadata"]["labels"]["g"] == "h"
    assert list(everything.init_containers("verifier")) == ["first", "fetch"]
    for container in (everything.container("verifier"), everything.init_containers("verifier")["fetch"]):
        assert "HF_ENDPOINT" in [entry["name"] for entry in container["env"]]
        assert {"name": "authorities", "mountPath": "/etc/authorities"} in container["volumeMounts"]
    (constraint,) = everything.pod("verifier")["spec"]["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "topology.kubernetes.io/zone"
    assert component(constraint["labelSelector"]["matchLabels"]) == "verifier"
