"""Reads from the drafters' metrics how far they lag."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_TIMEOUT_S = 2.0
LAG = "paceline:drafter_lag_tokens"
SESSIONS = "paceline:drafter_sessions"


async def read_lag(addresses: Sequence[str]) -> float:
    """Returns how many committed tokens drafters lag behind: the mean of those that have sessions, 0 if none has.

    A drafter's lag is that of the session furthest behind in its last step. One that does not answer is left out.

    Args:
        addresses: Where their metrics are, `host:port`.
    """
    # Reading certificates, which nobody needs here, takes longer than all the rest.
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
