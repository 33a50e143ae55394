"""Renders each set of values once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.k8s.chart import Rendered, render, values_files

# What no values file switches on all at once.
EVERYTHING: dict[str, Any] = {
    "ipv6": True,
    "model": {
        "target": "hf://meta-llama/Llama-3.3-70B-Instruct@6f6073b",
        "draft": "pvc://drafts/Llama-3.2-1B-Instruct",
        "tokenizer": "image://registry/tokenizers:1#llama-3",
        "volume": {"persistentVolumeClaim": {"claimName": "checkpoints", "readOnly": True}},
        "token": {"secret": "hub"},
    },
    "tls": {"enabled": True},
    "tracing": {"endpoint": "http://collector:4317", "sampleRatio": 0.25},
    "imagePullSecrets": ["registry"],
    "gateway": {
        "apiKeys": {"lines": ["alice:" + 64 * "a" + ":60"]},
        "tlsSecret": "doors",
        "settings": {"max-body-bytes": 8388608},
        "env": {"LOG": "x"},
        "ingress": {"enabled": True, "className": "nginx", "annotations": {"a": "b"}, "tlsSecret": "ingress"},
        "service": {"type": "LoadBalancer", "annotations": {"c": "d"}},
        "autoscaling": {"enabled": True},
    },
    "verifier": {
        "gpu": True,
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "affinity": {"nodeAffinity": {}},
        "podAnnotations": {"e": "f"},
        "podLabels": {"g": "h"},
        "weights": {"claim": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Gi"}}}},
        "extraEnv": [{"name": "HF_ENDPOINT", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "endpoint"}}}],
        "extraVolumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "extraVolumeMounts": [{"name": "authorities", "mountPath": "/etc/authorities"}],
        "initContainers": [{"name": "first", "image": "first:1"}],
        "serviceAccount": {"annotations": {"iam.gke.io/gcp-service-account": "paceline@project"}},
        "topologySpreadConstraints": [
            {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "autoscaling": {"enabled": True},
        "settings": {"speculative-config": {"method": "draft_model+ngram", "num_speculative_tokens": 6}},
    },
    "drafter": {"gpu": True, "autoscaling": {"enabled": True}, "disruptionBudget": {"maxUnavailable": "50%"}},
    "redis": {"password": "a-password-of-some-length"},
    "networkPolicy": {
        "clients": [{"podSelector": {}}],
        "egress": {"enabled": True, "rules": [{"ports": [{"port": 443}]}]},
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "gatewayKey": {"secret": "prometheus-key"}},
        "alerts": {"enabled": True},
        "dashboard": {"enabled": True},
    },
}
SETS = {**values_files(), "everything": EVERYTHING}
SCALED = {tier: {"autoscaling": {"enabled": True}} for tier in ("gateway", "verifier", "drafter")}
# What takes the place of something else in the sets above.
OPTIONS: dict[str, dict[str, Any]] = {
    "keda": {**SCALED, "keda": {"prometheus": "http://prometheus.monitoring.svc:9090"}},
    "gateway api": {
        "gateway": {
            "httpRoute": {"enabled": True, "parentRefs": [{"name": "internet"}], "hostnames": ["llm.example.com"]},
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        },
        "test": {"apiKey": {"secret": "key"}},
    },
    "several hosts": {
        "model": {"target": "hf://deepseek-ai/DeepSeek-V3"},
        "verifier": {
            "engine": "vllm",
            "gpu": True,
            "hosts": 2,
            "vllmArgs": ["--distributed-executor-backend=ray", "--pipeline-parallel-size=2"],
            "weights": {"claim": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Ti"}}}},
        },
        "networkPolicy": {"clients": [{"podSelector": {}}], "egress": {"enabled": True}},
    },
}


@pytest.fixture(scope="package", params=sorted(SETS))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """The chart with the defaults, with each values file, and with everything switched on."""
    return render(SETS[request.param])


@pytest.fixture(scope="package")
def defaults() -> Rendered:
    """The chart with no values given."""
    return render({})


@pytest.fixture(scope="package")
def everything() -> Rendered:
    """The chart with everything switched on."""
    return render(EVERYTHING)
