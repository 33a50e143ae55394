"""A whole fleet of simulated devices: real services, and a text that shows every error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.cluster.local import LocalFleet
from tests.support.fleet_runner import FleetRunner

PROFILE = "70b+0.5b@4xh100+h100"


@pytest.fixture(scope="module")
def runner() -> Iterator[FleetRunner]:
    with FleetRunner(
        simulate=PROFILE, acceptance=0.8, num_verifiers=2, model=None, draft_model=None, dtype="auto"
    ).running() as running:
        yield running


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "a fleet that nobody has rented yet ", "max_tokens": 120, "ignore_eos": True, **fields}
    response = httpx.post(f"{url}/v1/completions", json={"model": "demo-target", **body}, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@pytest.fixture(scope="module")
def plain(runner: FleetRunner) -> str:
    return text(complete(runner.url, speculation={"enabled": False}))


def test_models_say_that_they_are_simulated(runner: FleetRunner) -> None:
    [model] = httpx.get(f"{runner.url}/v1/models", trust_env=False).json()["data"]
    assert (model["id"], model["simulated"], model["exact"]) == ("demo-target", True, True)


def test_a_text_is_words_and_the_same_with_drafts_whatever_the_temperature(runner: FleetRunner, plain: str) -> None:
    assert len(plain.split()) > 60
    for _ in range(40):
        answer = complete(runner.url, temperature=0.7, seed=5)
        assert text(answer) == plain
        if answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 40:
            return
    pytest.fail("the drafter's guesses, of which four in five are right, were not accepted")


def test_stop_strings_and_schemas_bind_simulated_texts_too(runner: FleetRunner, plain: str) -> None:
    word = plain.split()[10]
    stopped = complete(runner.url, stop=[word])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert text(stopped) == plain[: plain.index(word)]
    schema = {"type": "object", "properties": {"kind": {"enum": ["draft", "plain"]}}, "required": ["kind"]}
    asked = {"json": {**schema, "additionalProperties": False}}
    bound = text(complete(runner.url, structured_outputs=asked, ignore_eos=False))
    assert bound in ('{"kind": "draft"}', '{"kind": "plain"}')


def test_a_verifier_that_is_killed_and_a_drafter_that_is_killed_change_no_text(runner: FleetRunner, plain: str) -> None:
    async def story() -> list[str]:
        fleet: LocalFleet = runner.fleet
        url = fleet.gateway_url

        async def one(number: int) -> str:
            await asyncio.sleep(0.02 * number)
            return text(await asyncio.to_thread(complete, url))

        running = [asyncio.create_task(one(number)) for number in range(12)]
        await asyncio.sleep(0.3)
        fleet.kill("verifier")
        fleet.kill("drafter")
        return await asyncio.gather(*running)

    assert set(runner.call(story(), 120)) == {plain}
