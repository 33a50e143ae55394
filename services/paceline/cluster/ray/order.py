"""What an actor is to run, and the command that follows from it; needs no Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.checkpoints.source import Repository, repository_of
from paceline.cluster.spec import CpuShare, Endpoint, FleetSpec, Launch
from paceline.cluster.supervisor import BackOff, ChildSpec
from paceline.core.messages import GATEWAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an actor is to run.

    Attributes:
        name: Of the replica, in the registry too.
        checkpoint: Folder of its model, on every node but for snapshots of the Hub; of a gateway that of the tokenizer.
        target: Folder of the target, for the drafter of an EAGLE-3 head.
        num_threads: Threads of a forward pass.
        port: Of the service; 0: a free one.
        second_port: Of its metrics, of a gateway gRPC; 0: a free one.
        env: Variables added to the node's environment.
    """

    name: str
    role: str
    services: FleetSpec
    checkpoint: Path
    target: Path | None
    redis_url: str
    log_dir: Path
    num_threads: int
    port: int = 0
    second_port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)


def service_child(order: Order, endpoint: Endpoint) -> ChildSpec:
    """Returns the process of a replica."""
    environ = {**os.environ, **order.env}
    launch = Launch(spec=order.services, redis_url=order.redis_url, log_dir=order.log_dir, environ=environ)
    if order.role == GATEWAY:
        return launch.gateway(endpoint, _anywhere(order.checkpoint))
    return launch.model(
        endpoint,
        _anywhere(order.checkpoint),
        CpuShare(num_threads=order.num_threads, cpus=()),
        announce=endpoint.address,
        target=None if order.target is None else _anywhere(order.target),
    )


def _anywhere(checkpoint: Path) -> Path | Repository:
    """What names a checkpoint on every node: a repository of the Hub, or a folder that is on all of them."""
    return repository_of(checkpoint) or checkpoint
