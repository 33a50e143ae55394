"""A fleet on Ray without Ray: the command of a replica, and what it takes of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cluster.checkpoints import Checkpoints
from paceline.cluster.fleet_file import RayTier, ray_tiers
from paceline.cluster.ray.fleet import bundle_of
from paceline.cluster.ray.host import ServiceSpec
from paceline.cluster.spec import FleetSpec, ServicePort
from paceline.service.config import load
from paceline.verifier.config import VerifierConfig


def order(**more: Any) -> ServiceSpec:
    settings: dict[str, Any] = {
        "role": "verifier",
        "number": 1,
        "services": FleetSpec(dtype="float32", verifier_arg=("--max-num-seqs=8",)),
        "checkpoints": Checkpoints(target=Path("/models/large"), drafts=()),
        "redis_url": "redis://10.0.0.5:6379",
        "log_dir": Path("/logs"),
        "tier": RayTier(cpus=4.5),
    }
    return ServiceSpec(**(settings | more))


def endpoint(role: str = "verifier") -> ServicePort:
    return ServicePort(name=f"{role}-1", role=role, host="10.0.0.7", port=4100, second_port=4101)


def test_a_verifier_announces_where_its_node_is_reached() -> None:
    config = load(VerifierConfig, order().child(endpoint()).argv[3:], {}, "verifier", "")
    assert (config.announce, config.host, config.replica_id) == ("10.0.0.7:4100", "10.0.0.7", "verifier-1")
    assert (config.threads, config.max_num_seqs) == (4, 8)


def test_variables_of_the_tier_reach_the_process_and_settings_of_others_do_not() -> None:
    child = order(tier=RayTier(env={"NCCL_DEBUG": "INFO", "PACELINE_PORT": "1"})).child(endpoint())
    assert child.env["NCCL_DEBUG"] == "INFO"
    assert "PACELINE_PORT" not in child.env


def test_a_gateway_gets_both_its_ports() -> None:
    child = order(role="gateway").child(endpoint("gateway"))
    assert child.argv[child.argv.index("--grpc-port") + 1] == "4101"
    assert child.argv[child.argv.index("--port") + 1] == "4100"


def test_a_bundle_holds_cpus_gpus_their_kind_and_custom_resources() -> None:
    tier = {"cpus": 8, "gpus": 1, "accelerator_type": "H100", "resources": {"verifier-gpu": 1}}
    bundle = bundle_of(ray_tiers({"verifier": tier})["verifier"])
    assert bundle == {"CPU": 8.0, "GPU": 1.0, "accelerator_type:H100": 0.001, "verifier-gpu": 1.0}
    assert bundle_of(ray_tiers({})["drafter"]) == {"CPU": 1.0}
