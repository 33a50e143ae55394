"""Reads the Prometheus metrics of a service, for benches and tests."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
from prometheus_client.parser import text_string_to_metric_families

from paceline.cluster.local import LocalFleet
from paceline.obs.metrics import MODEL_NAME

TIMEOUT_S = 5.0


async def scrape(address: str) -> dict[str, float]:
    """Returns the samples of `http://address/metrics` by name, summed over their labels.

    The sums of each value of a label other than the model's are there too, as `name{value}`.
    """
    # Reading certificates, which nobody needs here, takes longer than all the rest.
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S, verify=False) as client:
        response = await client.get(f"http://{address}/metrics")
        response.raise_for_status()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            for value in {value for name, value in sample.labels.items() if name != MODEL_NAME}:
                name = f"{sample.name}{{{value}}}"
                totals[name] = totals.get(name, 0.0) + sample.value
    return totals


async def sessions_left(fleet: LocalFleet) -> dict[str, int]:
    """Returns the sessions that the services of a fleet still count, by service; empty when there are none."""
    async with httpx.AsyncClient(trust_env=False) as client:
        health = (await client.get(f"{fleet.gateway_url}/health")).json()
    verifier = await scrape(fleet.endpoint("verifier").second_address)
    drafter = await scrape(fleet.endpoint("drafter").second_address)
    counts = {
        "gateway": health["sessions"],
        "verifier, running": verifier["vllm:num_requests_running"],
        "verifier, waiting": verifier["vllm:num_requests_waiting"],
        "drafter": drafter["paceline:drafter_sessions"],
    }
    return {name: int(count) for name, count in counts.items() if count}


def mean_between(histogram: str, scrapes: list[tuple[Mapping[str, float], Mapping[str, float]]]) -> float:
    """Mean of a histogram over stretches, each between two scrapes; 0 when nothing was observed."""
    total, count = (
        sum(after.get(name, 0.0) - before.get(name, 0.0) for before, after in scrapes)
        for name in (f"{histogram}_sum", f"{histogram}_count")
    )
    return total / count if count else 0.0
