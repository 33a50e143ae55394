"""How many drafters there should be, by how far they lag behind the commits.

`decide` is pure: time comes as a parameter. The names are those of Ray Serve's autoscaler where it has any.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.fleet_file import DrafterSettings

SCRAPE_TIMEOUT_S = 2.0
LAG = "paceline:drafter_lag_tokens"
SESSIONS = "paceline:drafter_sessions"
# Within this share of the target nothing changes.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LagReading:
    """What the drafters reported at one moment.

    Attributes:
        num_replicas: Drafters there are.
        num_starting: Of these the ones that are not well (yet).
        lag_tokens: Mean lag of those that have sessions; 0 if none has.
    """

    num_replicas: int
    num_starting: int
    lag_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingState:
    """Since when more, or fewer, drafters have been wanted without a break; None: they are not."""

    more_since_s: float | None = None
    fewer_since_s: float | None = None


def wanted_replicas(limits: DrafterSettings, reading: LagReading) -> int:
    """Returns the number of drafters that would bring the lag to its target, `ceil(replicas * lag / target)`.

    It at most doubles, so that one wild reading does not fill the cluster, and does not grow while a drafter is still
    on its way.
    """
    ratio = reading.lag_tokens / limits.target_lag_tokens
    count = reading.num_replicas
    if abs(ratio - 1.0) > TOLERANCE:
        count = min(math.ceil(count * ratio), 2 * count)
    if reading.num_starting:
        count = min(count, reading.num_replicas)
    return max(limits.min_replicas, min(limits.max_replicas, count))


def decide(
    limits: DrafterSettings, state: ScalingState, reading: LagReading, *, now_s: float
) -> tuple[ScalingState, int]:
    """Returns the next state and how many drafters there shall be now.

    More come when more were wanted for `upscale_delay_s` without a break, one goes when fewer were wanted for
    `downscale_delay_s`. Either restarts the wait, so that a change shows its effect before the next one. Outside the
    limits nothing is waited for.
    """
    count, wanted = reading.num_replicas, wanted_replicas(limits, reading)
    if count < limits.min_replicas:
        return ScalingState(), limits.min_replicas
    if count > limits.max_replicas:
        return ScalingState(), limits.max_replicas
    if wanted == count:
        return ScalingState(), count
    if wanted > count:
        since_s = now_s if state.more_since_s is None else state.more_since_s
        if now_s - since_s >= limits.upscale_delay_s:
            return ScalingState(), wanted
        return ScalingState(more_since_s=since_s), count
    since_s = now_s if state.fewer_since_s is None else state.fewer_since_s
    if now_s - since_s >= limits.downscale_delay_s:
        return ScalingState(), count - 1
    return ScalingState(fewer_since_s=since_s), count


async def read_lag(addresses: Sequence[str]) -> float:
    """Returns how many committed tokens drafters lag behind: the mean of those that have sessions, 0 if none has.

    A drafter's lag is that of the session furthest behind in its last step. One that does not answer is left out.

    Args:
        addresses: Where their metrics are, `host:port`.
    """
    # Loading certificates, which are not needed here, would take longer than the requests.
    async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False, verify=False) as client:
        pages = await asyncio.gather(*(_page(client, address) for address in addresses))
    return mean_lag(pages)


def mean_lag(pages: Sequence[str]) -> float:
    """Returns the mean lag of the drafters that have sessions, by their pages of metrics."""
    values = [gauges(page) for page in pages]
    lags = [each[LAG] for each in values if each.get(SESSIONS)]
    return sum(lags) / len(lags) if lags else 0.0


def gauges(page: str) -> dict[str, float]:
    """Returns the samples of a page of metrics that have no labels, by name."""
    families = text_string_to_metric_families(page)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def _page(client: httpx.AsyncClient, address: str) -> str:
    try:
        response = await client.get(f"http://{address}/metrics")
        return response.text if response.status_code == httpx.codes.OK else ""
    except httpx.HTTPError:
        return ""
