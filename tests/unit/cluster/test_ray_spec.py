"""A fleet's file on Ray: what it says arrives, and what it must not say is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.fleet_file import check_resize, parse_spec, read_spec
from paceline.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "docs" / "ray"


def test_an_empty_file_is_the_demo_pair_with_one_replica_of_each_tier() -> None:
    spec = parse_spec({})
    assert [spec.num_replicas(role) for role in ("gateway", "verifier", "drafter")] == [1, 1, 1]
    assert spec.services.model is None


def test_what_tiers_share_and_their_flags_reach_the_services() -> None:
    spec = parse_spec(
        {
            "model": "/models/large",
            "speculative_config": {"method": "ngram"},
            "verifier": {"args": ["--max-num-seqs=8"], "env": {"OMP_PROC_BIND": 1}, "resources": {"verifier-gpu": 1}},
        }
    )
    assert spec.services.model == Path("/models/large")
    assert json.loads(spec.services.speculative_config) == {"method": "ngram"}
    assert spec.services.verifier_arg == ("--max-num-seqs=8",)
    assert (spec.verifier.env, spec.verifier.resources) == ({"OMP_PROC_BIND": "1"}, {"verifier-gpu": 1.0})


def test_drafters_that_scale_begin_with_the_fewest_and_none_is_plain_decoding() -> None:
    spec = parse_spec({"drafter": {"min_replicas": 2, "max_replicas": 5}})
    assert (spec.num_replicas("drafter"), spec.services.num_drafters) == (2, 5)
    assert parse_spec({"drafter": {"replicas": 0}}).services.drafter is False


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the file must be a mapping of names to values, got []"),
        ({"modell": "x"}, "modell is no setting; there are gateway, verifier, drafter, model"),
        ({"dtype": "int8"}, "dtype must be one of auto, bfloat16, float32, got 'int8'"),
        ({"verifier": None}, "verifier must be a mapping of names to values, got None"),
        ({"verifier": {"replica": 2}}, "verifier.replica is no setting; there are replicas"),
        ({"verifier": {"replicas": 0}}, "verifier.replicas must be at least 1, got 0"),
        ({"gateway": {"replicas": 0}}, "gateway.replicas must be at least 1, got 0"),
        ({"drafter": {"replicas": 2.5}}, "drafter.replicas must be a whole number from 0 to 1024, got '2.5'"),
        ({"drafter": {"cpus": 0}}, "drafter.cpus must be a number from 0.01 to 4096, got '0'"),
        ({"drafter": {"cpus": [1]}}, "drafter.cpus must be a number from 0.01 to 4096, got [1]"),
        ({"drafter": {"cpus": None}}, "drafter.cpus must be a number from 0.01 to 4096, got 'None'"),
        ({"verifier": {"gpus": 1.5}}, "verifier.gpus must be a whole number above 1, or a part of one GPU, got 1.5"),
        ({"verifier": {"accelerator_type": "H100"}}, "verifier.accelerator_type needs verifier.gpus of more than 0"),
        ({"verifier": {"strategy": "NEAR"}}, "verifier.strategy must be one of SPREAD, STRICT_SPREAD, PACK"),
        ({"verifier": {"args": "--x"}}, "verifier.args must be a list, got '--x'"),
        ({"verifier": {"resources": {"GPU": 1}}}, "verifier.resources.GPU: is set by gpus"),
        ({"verifier": {"resources": {"big": 0}}}, "verifier.resources.big must be a number above 0, at most 1e+09"),
        ({"verifier": {"env": {"PACELINE_PORT": 1}}}, "verifier.env.PACELINE_PORT: settings of the service go"),
        ({"verifier": {"env": {"A": None}}}, "verifier.env.A must be text or a number, got None"),
        ({"gateway": {"replicas": 2}}, "gateway.port 8000: two gateways on one host cannot share it"),
        ({"gateway": {"replicas": 2, "port": 0}}, "gateway.grpc_port 8001: two gateways on one host cannot share it"),
        ({"drafter": {"replicas": 1, "max_replicas": 2}}, "drafter.replicas and drafter.max_replicas exclude"),
        ({"drafter": {"min_replicas": 3, "max_replicas": 2}}, "drafter.min_replicas must be at most max_replicas 2"),
    ],
)  # fmt: skip
def test_a_bad_key_or_value_is_refused_with_its_name_and_limit(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(document)
    assert str(caught.value).startswith(message)


def test_a_file_is_named_when_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        read_spec(path)
    for text, message in (
        ("a: [", " is no YAML: while parsing"),
        ("verifier: !!python/object/apply:os.system [true]", " is no YAML: could not determine a constructor"),
        ("verifier: {cpus: many}", ": verifier.cpus must be a number from 0.01 to 4096, got 'many'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_spec(path)
        assert str(caught.value).startswith(f"--spec {path}{message}")


def test_only_numbers_of_replicas_may_change_while_the_fleet_runs() -> None:
    old = parse_spec({"verifier": {"replicas": 2}})
    check_resize(old, parse_spec({"verifier": {"replicas": 3}, "drafter": {"max_replicas": 4, "target_lag_tokens": 2}}))
    for changed, name in [
        ({"verifier": {"cpus": 2}}, "verifier.cpus"),
        ({"verifier": {"resources": {"big": 1}}}, "verifier.resources"),
        ({"drafter": {"replicas": 0}}, "drafter"),
        ({"model": "/other"}, "model"),
    ]:
        with pytest.raises(ConfigError, match=rf"^{name} cannot change while the fleet runs"):
            check_resize(old, parse_spec({"verifier": {"replicas": 2}, **changed}))


def test_a_gateway_with_fixed_ports_is_added_only_where_ray_keeps_two_from_one_host() -> None:
    one, two = ({"replicas": count, "strategy": "STRICT_SPREAD"} for count in (1, 2))
    free, kept = {"port": 0, "grpc_port": 0}, {"resources": {"gateway-port": 1}}
    for more in (free, kept):
        check_resize(parse_spec({"gateway": one | more}), parse_spec({"gateway": two | more}))
    check_resize(parse_spec({"gateway": two}), parse_spec({"gateway": one}))
    with pytest.raises(ConfigError, match=r"^gateway\.replicas: .* port 8000 already"):
        check_resize(parse_spec({"gateway": one}), parse_spec({"gateway": two}))


def test_the_examples_are_read() -> None:
    specs = {path.stem: read_spec(path) for path in EXAMPLES.glob("*.yaml")}
    assert set(specs) == {"demo", "h100-l4", "large-target"}
    assert specs["h100-l4"].drafter.settings.scales
    large = specs["large-target"].verifier.settings
    assert large.engine == "vllm"
    assert f"--vllm-arg=--tensor-parallel-size={large.gpus:g}" in large.args
