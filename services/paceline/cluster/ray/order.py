"""What an actor is told to run, and the commands that follow from it; Ray itself is not needed here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from paceline.cluster.checkpoints import child_environment
from paceline.cluster.spec import CpuShare, Endpoint, FleetSpec, flags, gateway_child, model_child
from paceline.cluster.supervisor import BackOff, ChildSpec
from paceline.core.messages import GATEWAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What an actor is to run.

    Attributes:
        name: Of the replica, in the registry too.
        rank: Which of the replica's processes; 0 is the service that others call.
        num_ranks: How many processes compute its model together.
        leader: Name of the actor of rank 0. A handle among an actor's arguments might be lost before Ray restarts it.
        checkpoint: Folder of its model, on every node; of a gateway that of the tokenizer.
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
    rank: int = 0
    num_ranks: int = 1
    leader: str = ""
    port: int = 0
    second_port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)


# What a verifier's own arguments say for all of its ranks.
OF_ALL_RANKS = ("--dtype=", "--device=", "--tensor-parallel-silence-s=")


def service_child(order: Order, endpoint: Endpoint, rendezvous: str) -> ChildSpec:
    """Returns the process of a replica that others call; `rendezvous` is for its other ranks, if it has any."""
    environ = {**os.environ, **order.env}
    if order.role == GATEWAY:
        return gateway_child(order.services, endpoint, order.checkpoint, order.redis_url, order.log_dir, environ)
    child = model_child(
        order.services,
        endpoint,
        CpuShare(num_threads=order.num_threads, cpus=()),
        order.checkpoint,
        order.redis_url,
        order.log_dir,
        environ,
        endpoint.address,
        order.target,
    )
    return replace(child, argv=(*child.argv, *_rank_flags(order, rendezvous))) if rendezvous else child


def rank_child(order: Order, rendezvous: str) -> ChildSpec:
    """Returns the process of a rank above 0; it is well as long as it runs, since rank 0 does not go on without it."""
    name = f"{order.name}-rank-{order.rank}"
    argv = [
        *(sys.executable, "-m", "paceline.verifier.rank"),
        *flags(rank=order.rank, model=order.checkpoint, dtype=order.services.dtype, threads=order.num_threads),
        *_rank_flags(order, rendezvous),
        *(given for given in order.services.verifier_arg if given.startswith(OF_ALL_RANKS)),
    ]

    async def runs() -> bool:
        return True

    return ChildSpec(
        name=name,
        argv=tuple(argv),
        env=child_environment({**os.environ, **order.env}, num_threads=order.num_threads),
        is_healthy=runs,
        log_path=order.log_dir / f"{name}.log",
    )


def _rank_flags(order: Order, rendezvous: str) -> list[str]:
    return flags(tensor_parallel_size=order.num_ranks, tensor_parallel_rendezvous=rendezvous)
