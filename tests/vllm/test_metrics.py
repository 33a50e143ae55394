"""The helper shows what the tier counts, beside what vLLM counts of it."""

from __future__ import annotations

import pytest

from tests.vllm.client import ACCEPTED, DRAFTED, metrics, until_drafted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


async def test_the_helper_shows_the_tiers_metrics(steady, prompts) -> None:
    await until_drafted(steady.url, prompts[0])
    found = await metrics(steady.url)
    assert 0 < found[ACCEPTED] <= found[DRAFTED]
    ours = await metrics(steady.helper_url)
    assert ours["paceline:step_seconds_count"] > 0
    assert ours["paceline:gamma_count"] > 0
