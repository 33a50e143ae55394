"""From an order to the command of a process: what its service takes for flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cluster.fleet_file import parse_spec
from paceline.cluster.ray.order import Order, service_child
from paceline.cluster.spec import Endpoint
from paceline.service.config import load
from paceline.verifier.config import VerifierConfig


def order(**more: Any) -> Order:
    settings: dict[str, Any] = {
        "name": "verifier-1",
        "role": "verifier",
        "services": parse_spec({"dtype": "float32", "verifier": {"args": ["--max-num-seqs=8"]}}).services,
        "checkpoint": Path("/models/large"),
        "target": None,
        "redis_url": "redis://10.0.0.5:6379",
        "log_dir": Path("/logs"),
        "num_threads": 4,
    }
    return Order(**(settings | more))


def endpoint(role: str = "verifier") -> Endpoint:
    return Endpoint(name=f"{role}-1", role=role, host="10.0.0.7", port=4100, second_port=4101)


def test_a_verifier_announces_where_its_node_is_reached() -> None:
    child = service_child(order(), endpoint())
    config = load(VerifierConfig, child.argv[3:], {}, "verifier", "")
    assert (config.announce, config.host, config.replica_id) == ("10.0.0.7:4100", "10.0.0.7", "verifier-1")
    assert (config.threads, config.max_num_seqs) == (4, 8)


def test_variables_of_the_tier_reach_the_process_and_settings_of_others_do_not() -> None:
    env = {"NCCL_DEBUG": "INFO", "PACELINE_PORT": "1"}
    child = service_child(order(env=env), endpoint())
    assert child.env["NCCL_DEBUG"] == "INFO"
    assert "PACELINE_PORT" not in child.env


def test_a_gateway_gets_both_its_ports() -> None:
    child = service_child(order(name="gateway-1", role="gateway"), endpoint("gateway"))
    assert child.argv[child.argv.index("--grpc-port") + 1] == "4101"
    assert child.argv[child.argv.index("--port") + 1] == "4100"
