"""What the tier counts stands in vLLM's own `/metrics`, beside what vLLM counts of it."""

from __future__ import annotations

import pytest

from tests.vllm.client import ACCEPTED, DRAFTED, metrics, until_drafted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


async def test_the_tiers_metrics_are_in_vllms_own(steady, prompts) -> None:
    await until_drafted(steady.url, prompts[0])
    found = await metrics(steady.url)
    assert 0 < found[ACCEPTED] <= found[DRAFTED]
    ours = {name for name in found if name.startswith("paceline:")}
    assert {"paceline:step_seconds_count", "paceline:gamma_count"} <= ours


async def test_they_come_from_the_helper_and_not_from_a_vllm_without_the_tier(plain) -> None:
    assert not [name for name in await metrics(plain.url) if name.startswith("paceline:")]
