"""One frame of the console: the fleet as it is at one moment, as a JSON object.

Pure: replicas, readings and the gateway's own counts in, JSON out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.gateway.api.console.figures import Json, Rates, Reading, mean_price, sum_of_rates, verifier_rates
from paceline.store.base import Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCounts:
    """A gateway's own figures.

    Attributes:
        replica_id: Its name in the registry.
        num_sessions: Sessions that it runs.
        sessions_at: The same, by the replica id of their verifier.
        tokens: Tokens that it has sent since it started.
    """

    replica_id: str
    num_sessions: int
    sessions_at: Mapping[str, int]
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The fleet at one look.

    Attributes:
        taken_s: When, in monotonic seconds.
        replicas: As the registry has them.
        readings: Metrics by replica id, of those that could be read.
        own: The gateway's own counts.
    """

    taken_s: float
    replicas: Sequence[Replica]
    readings: Mapping[str, Reading]
    own: OwnCounts


def frame(before: Look | None, now: Look) -> Json:
    """Returns what the console shows of two looks; without an earlier one, rates are missing."""
    rates = {} if before is None else _rates(before, now)
    return {
        "status": _status(now.replicas),
        "gateway": _gateway(before, now),
        "fleet": _fleet(now, rates),
        "replicas": [_replica(each, now, rates.get(each.replica_id)) for each in now.replicas],
        "edges": _edges(now),
    }


def _rates(before: Look, now: Look) -> dict[str, Rates]:
    """Returns the rates of verifiers that were read both times, by replica id."""
    found: dict[str, Rates] = {}
    for replica in now.replicas:
        sooner, later = before.readings.get(replica.replica_id), now.readings.get(replica.replica_id)
        if replica.role == VERIFIER and sooner is not None and later is not None:
            rates = verifier_rates(sooner, later)
            if rates is not None:
                found[replica.replica_id] = rates
    return found


def _status(replicas: Sequence[Replica]) -> str:
    present = {replica.role for replica in replicas if not replica.draining}
    if VERIFIER not in present:
        return "no verifier"
    return "drafting" if DRAFTER in present else "no drafter"


def _gateway(before: Look | None, now: Look) -> Json:
    own = now.own
    elapsed_s = 0.0 if before is None else now.taken_s - before.taken_s
    tokens = 0.0 if before is None else own.tokens - before.own.tokens
    return {
        "id": own.replica_id,
        "sessions": own.num_sessions,
        "tokens_per_s": tokens / elapsed_s if elapsed_s > 0 else None,
    }


def _fleet(now: Look, rates: Mapping[str, Rates]) -> Json:
    figures = dict.fromkeys(Rates().figures()) if not rates else sum_of_rates(list(rates.values())).figures()
    prices = [(now.readings[name].value("paceline:price"), each.steps) for name, each in rates.items()]
    return {
        **figures,
        "price": mean_price(prices),
        "unanswered_tokens": _sum_of(now, VERIFIER, "paceline:drafter_lag_tokens"),
        "uncomputed_tokens": _sum_of(now, DRAFTER, "paceline:drafter_lag_tokens"),
        "waiting": _sum_of(now, VERIFIER, "vllm:num_requests_waiting"),
    }


def _sum_of(now: Look, role: str, name: str) -> float | None:
    """Returns the sum of a gauge over the replicas of a role that could be read; None if none could."""
    ids = {replica.replica_id for replica in now.replicas if replica.role == role}
    values = [reading.value(name) for replica_id, reading in now.readings.items() if replica_id in ids]
    return sum(values) if values else None


def _replica(replica: Replica, now: Look, rates: Rates | None) -> Json:
    reading = now.readings.get(replica.replica_id)
    shown: Json = {
        "id": replica.replica_id,
        "role": replica.role,
        "address": replica.address,
        "zone": replica.zone,
        "model": "" if replica.identity is None else replica.identity.name,
        "sessions": replica.num_sessions,
        "max_sessions": replica.max_sessions,
        "draining": replica.draining,
        "read": reading is not None or replica.role == GATEWAY,
    }
    if reading is not None:
        shown |= {
            "lag_tokens": reading.value("paceline:drafter_lag_tokens"),
            "kv_usage": reading.value("vllm:kv_cache_usage_perc"),
        }
        if replica.role == VERIFIER:
            shown["price"] = reading.value("paceline:price")
    if rates is not None:
        shown |= {name: rates.figures()[name] for name in ("tokens_per_s", "gamma", "batch_size")}
    return shown


def _edges(now: Look) -> list[Json]:
    """Returns who serves whom: this gateway's sessions at verifiers, and the sessions that drafters draft for."""
    ids = {replica.address: replica.replica_id for replica in now.replicas if replica.role == DRAFTER}
    edges = [
        {"from": now.own.replica_id, "to": verifier_id, "sessions": count}
        for verifier_id, count in now.own.sessions_at.items()
    ]
    for replica in now.replicas:
        reading = now.readings.get(replica.replica_id)
        if replica.role == VERIFIER and reading is not None:
            edges += [
                {"from": replica.replica_id, "to": ids.get(address, address), "sessions": int(count)}
                for address, count in reading.by_label("paceline:drafted_sessions").items()
            ]
    return edges
