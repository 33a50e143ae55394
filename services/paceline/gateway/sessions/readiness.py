"""Whether a gateway can serve: a verifier of one of its models at least is there, for tokens that are ours.

It knows neither HTTP nor gRPC. Whether the process lives is another question, which answering at all answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.sessions.sessions import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What health says.

    Attributes:
        ready: Whether new requests can be served.
        status: In a word: `ok`; `degraded` if something is wrong that does not stop requests; or why not.
        models: What is wrong with each model that cannot be served.
        tasks: Background tasks that fail.
    """

    ready: bool
    status: str
    models: dict[str, str]
    tasks: tuple[str, ...]


def readiness(sessions: Sessions, fleet: Fleet, failing: Sequence[str]) -> Readiness:
    """Returns how the gateway is now; a dead registry or a failing task is shown, but does not stop it."""
    models: dict[str, str] = {}
    for name in fleet.own_names:
        try:
            fleet.model(name)
        except UnavailableError as error:
            models[name] = str(error)
    some = len(models) < len(fleet.own_names)
    if sessions.draining:
        status = "draining"
    elif not some:
        status = "no verifier"
    else:
        status = "degraded" if models or fleet.store_error or failing else "ok"
    return Readiness(ready=some and not sessions.draining, status=status, models=models, tasks=tuple(failing))


def report(now: Readiness, sessions: Sessions, fleet: Fleet) -> dict[str, object]:
    """Returns what health shows of it, and of the fleet."""
    roles = [replica.role for replica in fleet.replicas if not replica.draining]
    return {
        "status": now.status,
        "store": fleet.store_error or "ok",
        "tasks": ", ".join(now.tasks) or "ok",
        "models": now.models or "ok",
        "verifiers": roles.count(VERIFIER),
        "drafters": roles.count(DRAFTER),
        "sessions": sessions.num_running,
    }
