"""Replicas as the registry shows them."""

from __future__ import annotations

from paceline.core.messages import ModelIdentity
from paceline.store.base import Replica


def replica(
    name: str,
    role: str = "verifier",
    *,
    model: str = "tiny",
    vocab_hash: str = "v",
    num_sessions: int = 0,
    max_sessions: int = 8,
    draining: bool = False,
    zone: str = "",
) -> Replica:
    identity = ModelIdentity(name=model, vocab_hash=vocab_hash, vocab_size=300, context_len=64)
    return Replica(
        replica_id=name,
        role=role,
        address=f"{name}:1",
        identity=identity,
        max_sessions=max_sessions,
        num_sessions=num_sessions,
        draining=draining,
        zone=zone,
    )
