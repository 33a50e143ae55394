"""A fleet's file: what it says arrives on one machine and on Ray, and what it must not say is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.cluster.fleet_file import check_for_ray, parse_fleet, read_fleet_file
from paceline.cluster.spec import FleetSpec
from paceline.cluster.up import fleet_settings
from paceline.core.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[3] / "docs" / "ray").glob("*.yaml"))


def written(folder: Path, document: Any) -> str:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return f"--fleet={path}"


def test_without_a_file_a_tier_has_one_replica_of_one_cpu() -> None:
    spec, tiers = fleet_settings([])
    assert spec == FleetSpec()
    assert [(tier.cpus, tier.gpus, tier.strategy) for tier in tiers.values()] == [(1, 0, "SPREAD")] * 3


def test_a_file_names_settings_as_flags_do_and_flags_win(tmp_path: Path) -> None:
    document = {
        "model": "/models/large",
        "speculative_config": {"method": "ngram"},
        "num_verifiers": 3,
        "drafter": False,
        "verifier_arg": ["--max-num-seqs=8"],
        "ray": {"verifier": {"env": {"OMP_PROC_BIND": 1}, "resources": {"verifier-gpu": 1}, "gpus": 0.5}},
    }
    spec, tiers = fleet_settings([written(tmp_path, document), "--num-verifiers=2"])
    assert (spec.model, spec.num_verifiers, spec.drafter) == (Path("/models/large"), 2, False)
    assert json.loads(spec.speculative_config) == {"method": "ngram"}
    assert spec.verifier_arg == ("--max-num-seqs=8",)
    verifier = tiers["verifier"]
    assert (verifier.env, verifier.resources, verifier.gpus) == ({"OMP_PROC_BIND": "1"}, {"verifier-gpu": 1.0}, 0.5)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "the file must be a mapping of names to values, got []"),
        ({"modell": "x"}, "modell is no setting; there are ray, model"),
        ({"fleet": "x"}, "fleet is no setting"),
        ({"ray": "auto"}, "ray must be a mapping of names to values, got 'auto'"),
        ({"ray": {"drafters": {}}}, "ray.drafters is no section; there are gateway, verifier, drafter"),
        ({"ray": {"verifier": None}}, "ray.verifier must be a mapping of names to values, got None"),
        ({"ray": {"verifier": {"replica": 2}}}, "ray.verifier.replica is no setting; there are cpus"),
        ({"ray": {"drafter": {"cpus": 0}}}, "ray.drafter.cpus must be a number from 0.01 to 4096, got '0'"),
        ({"ray": {"drafter": {"cpus": [1]}}}, "ray.drafter.cpus must be a number from 0.01 to 4096, got [1]"),
        ({"ray": {"verifier": {"gpus": 1.5}}}, "ray.verifier.gpus must be a whole number above 1, or a part of one"),
        ({"ray": {"verifier": {"accelerator_type": "H100"}}}, "ray.verifier.accelerator_type needs ray.verifier.gpus"),
        ({"ray": {"verifier": {"strategy": "NEAR"}}}, "ray.verifier.strategy must be one of SPREAD, STRICT_SPREAD"),
        ({"ray": {"verifier": {"resources": {"GPU": 1}}}}, "ray.verifier.resources.GPU: is set by gpus"),
        ({"ray": {"verifier": {"resources": {"big": 0}}}}, "ray.verifier.resources.big must be a number above 0"),
        ({"ray": {"verifier": {"env": {"PACELINE_PORT": 1}}}}, "ray.verifier.env.PACELINE_PORT: settings of a service"),
        ({"ray": {"verifier": {"env": {"A": None}}}}, "ray.verifier.env.A must be text or a number, got None"),
    ],
)  # fmt: skip
def test_a_bad_key_or_value_is_refused_with_its_name_and_limit(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fleet(document, "")
    assert str(caught.value).startswith(message)


def test_a_file_is_named_when_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.yaml"
    with pytest.raises(ConfigError, match="No such file"):
        read_fleet_file(path)
    for text, message in (
        ("a: [", ": while parsing"),
        ("model: !!python/object/apply:os.system [true]", ": could not determine a constructor"),
        ("ray: {verifier: {cpus: many}}", ": ray.verifier.cpus must be a number from 0.01 to 4096, got 'many'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_fleet_file(path)
        assert str(caught.value).startswith(f"--fleet {path}{message}")
    with pytest.raises(SystemExit):
        fleet_settings([written(tmp_path, {"num_verifiers": "many"})])
    assert f"{path}: num_verifiers must be a whole number from 1 to 1024, got 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"host": "0.0.0.0"}, "--host has no meaning with --ray"),
        ({"pin": False}, "--pin has no meaning with --ray"),
    ],
)
def test_what_a_cluster_would_not_do_is_refused_on_ray_alone(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_for_ray(fleet_settings([written(tmp_path, document)])[0])
    assert str(caught.value).startswith(message)


def test_rays_client_protocol_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fleet_settings(["--ray", "ray://head:10001"])
    assert (
        "--ray must be host:port or auto, on a host of the cluster, got 'ray://head:10001'" in capsys.readouterr().err
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_read(path: Path) -> None:
    spec, tiers = fleet_settings([f"--fleet={path}"])
    check_for_ray(spec)
    if spec.verifier_engine == "vllm":
        assert f"--vllm-arg=--tensor-parallel-size={tiers['verifier'].gpus:g}" in spec.verifier_arg
