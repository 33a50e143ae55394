"""How many drafters there should be, by how far they lag behind the commits.

The names are those of Ray Serve's autoscaler where it has any.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.fleet_file import Scaling

SCRAPE_TIMEOUT_S = 2.0
LAG = "paceline:drafter_lag_tokens"
SESSIONS = "paceline:drafter_sessions"
# Within this share of the target nothing changes.
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Trend:
    """Since when more (1) or fewer (-1) drafters have been wanted without a break."""

    direction: int = 0
    since_s: float = 0.0


def scale(
    scaling: Scaling, trend: Trend, lag_tokens: float, *, fewest: int, count: int, num_starting: int, now_s: float
) -> tuple[Trend, int]:
    """Returns the next trend and how many drafters there shall be now.

    `ceil(count * lag / target)` would bring the lag to its target. It at most doubles, so that one wild reading does
    not fill the cluster, and does not grow while a drafter is still on its way. More come when more were wanted for
    `upscale_delay_s` without a break, one goes when fewer were wanted for `downscale_delay_s`. Either restarts the
    wait, so that a change shows its effect before the next one.
    """
    ratio = lag_tokens / scaling.target_lag_tokens
    wanted = count if abs(ratio - 1.0) <= TOLERANCE else min(math.ceil(count * ratio), 2 * count)
    if num_starting:
        wanted = min(wanted, count)
    wanted = max(fewest, min(scaling.max_drafters, wanted))
    direction = (wanted > count) - (wanted < count)
    if direction != trend.direction:
        trend = Trend(direction, now_s)
    delay_s = scaling.upscale_delay_s if direction > 0 else scaling.downscale_delay_s
    if not direction or now_s - trend.since_s < delay_s:
        return trend, count
    return Trend(), wanted if direction > 0 else count - 1


async def read_lag(addresses: Sequence[str]) -> float:
    """Returns how many committed tokens drafters lag behind, by their metrics at `host:port`.

    A drafter's lag is that of the session furthest behind in its last step. One that does not answer is left out.
    """
    # Loading certificates, which are not needed here, would take longer than the requests.
    async with httpx.AsyncClient(timeout=SCRAPE_TIMEOUT_S, trust_env=False, verify=False) as client:
        return mean_lag(await asyncio.gather(*(_page(client, address) for address in addresses)))


def mean_lag(pages: Sequence[str]) -> float:
    """Returns the mean lag of the drafters that have sessions, by their pages of metrics; 0 if none has."""
    values = [
        {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
        for page in pages
    ]
    lags = [each[LAG] for each in values if each.get(SESSIONS)]
    return sum(lags) / len(lags) if lags else 0.0


async def _page(client: httpx.AsyncClient, address: str) -> str:
    try:
        response = await client.get(f"http://{address}/metrics")
        return response.text if response.status_code == httpx.codes.OK else ""
    except httpx.HTTPError:
        return ""
