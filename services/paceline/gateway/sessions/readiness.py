"""Whether a gateway can serve: at least one of its models has a verifier that it can reach, with the same tokens.

It knows neither HTTP nor gRPC. Liveness is another question, which any answer at all settles.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.sessions.sessions import Sessions

UNREACHABLE = "verifiers unreachable"
_UNREACHED = "none of its verifiers can be reached from here"


def readiness(
    sessions: Sessions, fleet: Fleet, failing: Sequence[str], keys_problem: str = ""
) -> tuple[bool, dict[str, object]]:
    """Answers health checks; a dead registry or a failing task is shown, but does not stop the gateway.

    Args:
        sessions: Sessions of the gateway.
        fleet: As the gateway knows it.
        failing: Names of failing tasks.
        keys_problem: Which API keys are not in force, and why; empty: all are.

    Returns:
        Whether new requests can be served; and the state of the gateway and its fleet. `status` is `ok`, `degraded` if
        something is wrong that does not stop requests, or the reason that requests are refused.
    """
    problems = {name: problem for name in fleet.own_names if (problem := _problem(fleet, name)) is not None}
    served = len(problems) < len(fleet.own_names)
    if sessions.draining:
        status = "draining"
    elif not served:
        status = UNREACHABLE if _UNREACHED in problems.values() else "no verifier"
    else:
        status = "degraded" if problems or fleet.store_error or failing or keys_problem else "ok"
    roles = [replica.role for replica in fleet.replicas if not replica.draining]
    report: dict[str, object] = {
        "status": status,
        "store": fleet.store_error or "ok",
        "tasks": ", ".join(failing) or "ok",
        "keys": keys_problem or "ok",
        "models": problems or "ok",
        "verifiers": roles.count(VERIFIER),
        "drafters": roles.count(DRAFTER),
        "sessions": sessions.num_running,
    }
    return served and not sessions.draining, report


def _problem(fleet: Fleet, name: str) -> str | None:
    """Returns why a model cannot be served; None: it can."""
    try:
        fleet.model(name)
    except UnavailableError as error:
        return str(error)
    return None if fleet.health.any_reachable(fleet.verifiers(name)) else _UNREACHED
