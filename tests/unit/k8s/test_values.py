"""Values that cannot be meant are refused, by name, before anything is installed."""

from __future__ import annotations

import json
from typing import Any

import helm_python
import pytest

from tests.unit.k8s.chart import TIERS, render
from tests.unit.k8s.settings import SCHEMA_FILE, settings_schema

SCHEMA = json.loads(SCHEMA_FILE.read_text())


@pytest.mark.parametrize("tier", TIERS)
def test_settings_may_be_what_the_service_takes(tier: str) -> None:
    """After a change of a service's configuration class run `python -m tests.unit.k8s.settings`."""
    assert SCHEMA["$defs"][f"{tier}Settings"] == settings_schema(tier)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"verifer": {}}, "verifer"),
        ({"verifier": {"replicas": -1}}, "/verifier/replicas"),
        ({"verifier": {"gpus": 1}}, "gpus"),
        ({"verifier": {"settings": {"max-num-seq": 8}}}, "max-num-seq"),
        ({"verifier": {"settings": {"max-num-seqs": 0}}}, "/verifier/settings/max-num-seqs"),
        ({"verifier": {"settings": {"port": 9000}}}, "port"),
        ({"verifier": {"settings": {"dtype": "float16"}}}, "/verifier/settings/dtype"),
        ({"drafter": {"settings": {"draft-width": "three"}}}, "/drafter/settings/draft-width"),
        ({"drafter": {"env": {"PACELINE_PORT": "1"}}}, "PACELINE_PORT"),
        ({"drafter": {"autoscaling": {"targetUnmetPercent": 0}}}, "/drafter/autoscaling/targetUnmetPercent"),
        ({"drafter": {"disruptionBudget": {"minAvailable": 1}}}, "/drafter/disruptionBudget"),
        ({"gateway": {"settings": {"max-sessions": 1000000}}}, "/gateway/settings/max-sessions"),
        ({"gateway": {"apiKeys": {"lines": ["sk-the-key-itself"]}}}, "/gateway/apiKeys/lines/0"),
        ({"gateway": {"service": {"type": "Loadbalancer"}}}, "/gateway/service/type"),
        ({"model": {"name": "a,b"}}, "/model/name"),
        ({"model": {"target": "models/relative"}}, "/model/target"),
        ({"model": {"draft": "hf://Qwen3-0.6B"}}, "/model/draft"),
        ({"model": {"tokenizer": "s3://bucket/model"}}, "/model/tokenizer"),
        ({"verifier": {"extraEnv": [{"name": "PACELINE_PORT", "value": "1"}]}}, "/verifier/extraEnv/0"),
        ({"drafter": {"weights": {"claim": {}}}}, "/drafter/weights"),
        ({"model": {"volume": {"hostPath": {"path": "/m"}, "emptyDir": {}}}}, "/model/volume"),
        ({"redis": {"url": "http://redis:6379"}}, "/redis/url"),
        ({"redis": {"password": "short"}}, "/redis/password"),
        ({"tracing": {"sampleRatio": 1.5}}, "/tracing/sampleRatio"),
        ({"monitoring": {"serviceMonitor": {"interval": "often"}}}, "/monitoring/serviceMonitor/interval"),
    ],
)
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(values)
    assert named in str(refusal.value)
