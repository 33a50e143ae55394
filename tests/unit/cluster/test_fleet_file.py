"""One file for one machine, Ray and Kubernetes: the chart's values mean the same everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.fleet_file import READ, READ_ON_RAY, parse_spec, read_fleet_file
from paceline.cluster.up import fleet_spec
from paceline.core.errors import ConfigError

CHART = Path(__file__).parents[3] / "k8s" / "paceline"
FILES = sorted(CHART.glob("values/*.yaml"))


def written(folder: Path, document: Any) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_what_the_chart_says_of_tiers_models_and_the_store_holds_on_one_machine(tmp_path: Path) -> None:
    document = {
        "model": {"target": "/models/large", "draft": "/models/small"},
        "gateway": {"replicas": 2, "settings": {"max-sessions": 32, "strict-fields": True}},
        "verifier": {
            "replicas": 3,
            "engine": "vllm",
            "vllmArgs": ["--quantization=fp8"],
            "settings": {"speculative-config": {"method": "ngram"}, "threads": 2, "dtype": "bfloat16"},
        },
        "drafter": {"replicas": 4},
        "redis": {"url": "redis://store:6379"},
        "tracing": {"endpoint": "http://collector:4317", "sampleRatio": 0.5},
    }
    spec = fleet_spec(["--fleet", str(written(tmp_path, document))])
    assert (spec.model, spec.draft_model) == (Path("/models/large"), Path("/models/small"))
    assert (spec.num_gateways, spec.num_verifiers, spec.num_drafters) == (2, 3, 4)
    assert spec.gateway_arg == ("--max-sessions=32", "--strict-fields")
    assert spec.verifier_arg == ("--dtype=bfloat16", "--vllm-arg=--quantization=fp8")
    assert (spec.verifier_engine, spec.verifier_threads) == ("vllm", 2)
    assert json.loads(spec.speculative_config) == {"method": "ngram"}
    assert (spec.redis_url, spec.trace_sample_ratio) == ("redis://store:6379", 0.5)


def test_flags_win_over_the_file_and_no_drafters_is_plain_decoding(tmp_path: Path) -> None:
    file = written(tmp_path, {"verifier": {"replicas": 3}, "drafter": {"replicas": 2}})
    spec = fleet_spec(["--fleet", str(file), "--num-verifiers", "1"])
    assert (spec.num_verifiers, spec.num_drafters) == (1, 2)
    assert fleet_spec(["--fleet", str(written(tmp_path, {"drafter": {"replicas": 0}}))]).drafter is False


def test_values_of_kubernetes_alone_and_words_written_wrongly_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet_spec(["--fleet", str(written(tmp_path, {"verifer": {"replicas": 3}, "gateway": {"graceSeconds": 5}}))])
    assert capsys.readouterr().out == "not used on one machine: gateway.graceSeconds, verifer.replicas\n"


def test_a_file_that_is_no_mapping_and_a_bad_value_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    for text, message in (
        ("verifier: [", r"--fleet .*fleet\.yaml is no YAML"),
        ("- verifier", r"must be a mapping of names to values, got \['verifier'\]"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            fleet_spec(["--fleet", str(path)])
    with pytest.raises(SystemExit):
        fleet_spec(["--fleet", str(written(tmp_path, {"verifier": {"replicas": "many"}}))])
    assert "fleet.yaml: verifier.replicas must be a whole number from 1 to 64, got 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_the_chart_starts_a_fleet_on_one_machine_and_on_ray(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    local, on_ray = fleet_spec(["--fleet", str(path)]), parse_spec(read_fleet_file(path).on_ray())
    assert local.num_verifiers == on_ray.verifier.settings.replicas == values["verifier"].get("replicas", 1)
    target = values.get("model", {}).get("target")
    assert local.model == on_ray.services.model == (target and Path(target))
    assert local.simulate == on_ray.services.simulate == values.get("simulate", "")


def test_on_ray_cpus_gpus_and_scaling_are_those_of_the_pods() -> None:
    spec = parse_spec(read_fleet_file(CHART / "values" / "h100-l4.yaml").on_ray())
    assert (spec.verifier.settings.gpus, spec.verifier.settings.cpus) == (1, 8)
    assert spec.drafter.settings.scales
    assert spec.gateway.settings.strategy == "STRICT_SPREAD"


def test_on_ray_drafters_are_not_scaled_without_a_limit(tmp_path: Path) -> None:
    path = written(tmp_path, {"drafter": {"autoscaling": {"enabled": True}}})
    with pytest.raises(ConfigError, match=r"drafter\.autoscaling\.maxReplicas must be a number of replicas"):
        read_fleet_file(path).on_ray()


def test_every_value_that_is_read_is_one_of_the_charts() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert [name for name in sorted(READ | READ_ON_RAY) if not in_schema(schema, name)] == []


def in_schema(schema: dict[str, Any], name: str) -> bool:
    here = schema
    for part in name.split("."):
        if "$ref" in here:
            here = schema["$defs"][here["$ref"].rpartition("/")[2]]
        if part not in here.get("properties", {}):
            return bool(here.get("additionalProperties", True))
        here = here["properties"][part]
    return True
