"""The console before real services: its files, its figures, and the page in Chromium."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.messages import TokenOrigin
from paceline.gateway.api.console.figures import FIGURES_PATH, FILE_PATHS, SECURITY_HEADERS
from paceline.gateway.api.openapi import PATH
from tests.support.browser import browsing, chromium, problems_of
from tests.support.fleet_runner import FleetRunner
from tests.support.scripted_fleet import ScriptedFleet, scripted_fleet

WAIT_S = 100.0
KEY = "pl-alice-secret"
needs_chromium = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed here")


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    """A gateway that asks for keys."""
    keys_file = tmp_path / "keys"
    keys_file.write_text(f"alice:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    async with scripted_fleet(tmp_path, api_keys_file=keys_file, redis_url="memory://") as started:
        yield started


@asynccontextmanager
async def client_of(runner: FleetRunner) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=runner.url, timeout=WAIT_S, trust_env=False) as client:
        yield client


@asynccontextmanager
async def under_load(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Two streams at any time."""

    async def streams() -> None:
        body = {"prompt": "load", "max_tokens": 200, "temperature": 0.8, "ignore_eos": True}
        while True:
            (await client.post("/v1/completions", json=body)).raise_for_status()

    tasks = [asyncio.create_task(streams()) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# Token origins from a real verifier


async def completion(client: httpx.AsyncClient, temperature: float, speculation: dict[str, bool]) -> dict[str, Any]:
    body = {"prompt": "hello", "max_tokens": 80, "temperature": temperature, "seed": 3, "ignore_eos": True}
    answer = await client.post("/v1/completions", json={**body, "speculation": speculation})
    return dict(answer.raise_for_status().json())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_origins_add_up_to_the_record_and_their_texts_to_the_text(trees: FleetRunner, temperature: float) -> None:
    async with client_of(trees) as client, asyncio.timeout(WAIT_S):
        plain = await completion(client, temperature, {"enabled": False})
        accepted = 0
        # On a busy machine the drafter may be too late for a whole answer; what is told must be true all the same.
        while not accepted:
            told = await completion(client, temperature, {"token_origins": True})
            accepted = check_origins(told, plain["choices"][0]["text"])


def check_origins(told: dict[str, Any], text: str) -> int:
    """Returns the number of accepted tokens."""
    [choice] = told["choices"]
    record = told["metrics"]["speculative_decoding"]
    origins = [each["origin"] for each in choice["token_origins"]]
    assert len(origins) == told["usage"]["completion_tokens"] == 80
    assert "".join(each["text"] for each in choice["token_origins"]) == choice["text"] == text
    assert origins.count("accepted") == record["num_accepted_draft_tokens"]
    assert origins.count("recovered") + origins.count("bonus") == record["num_spec_steps"]
    assert origins.count("plain") == record["num_steps"] - record["num_spec_steps"] > 0
    return origins.count("accepted")


# Figures


async def test_figures_tell_what_real_services_do(trees: FleetRunner) -> None:
    async with client_of(trees) as client, under_load(client), asyncio.timeout(WAIT_S):
        while True:
            figures = (await client.get(FIGURES_PATH)).raise_for_status().json()
            replicas = {each["id"]: each for each in figures["replicas"]}
            counters = replicas["verifier-0"]["counters"]
            if counters["accepted"] and replicas["verifier-0"]["sessions"]:
                break
            await asyncio.sleep(0.2)
    assert {name: each["role"] for name, each in replicas.items()} == {
        "gateway-0": "gateway",
        "verifier-0": "verifier",
        "drafter-0": "drafter",
    }
    assert counters["accepted"] < counters["drafted"] <= 4 * counters["turns"]
    assert counters["steps"] > 0
    assert replicas["verifier-0"]["mode"].keys() == {"mode", "reason", "for_s"}
    assert 0 < replicas["drafter-0"]["guesses"]["accepted"] < replicas["drafter-0"]["guesses"]["verified"]
    assert {replicas[each]["mode"] for each in ("gateway-0", "drafter-0")} == {None}


# Files


async def test_every_file_is_served_with_its_type_its_policy_and_a_mark_to_ask_for_changes(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        for path in FILE_PATHS:
            answer = await fleet.http.get(path)
            assert answer.status_code == 200
            kinds = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
            assert answer.headers["content-type"].split(";")[0] == kinds.get(Path(path).suffix, "text/html")
            assert int(answer.headers["content-length"]) == len(answer.content) > 0
            assert SECURITY_HEADERS.items() <= answer.headers.items()
            again = await fleet.http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_page_asks_for_nothing_but_what_the_gateway_serves(tmp_path: Path, path: str) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        page = (await fleet.http.get(path)).text
    named = set(re.findall(r'(?:src|href)="([^"#]+)"', page))
    assert named
    assert {f"/{name}" for name in named} <= FILE_PATHS
    assert not re.search(r"<style|<script>| style=| on[a-z]+=", page)


async def test_without_the_console_its_paths_are_unknown(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, console=False) as fleet:
        for path in ("/", "/docs", "/console/console.js", "/console/figures"):
            assert (await fleet.http.get(path)).status_code == 404


async def test_with_keys_the_files_are_open_and_the_figures_are_not(guarded: ScriptedFleet) -> None:
    assert {(await guarded.http.get(path)).status_code for path in FILE_PATHS} == {200}
    assert (await guarded.http.get(FIGURES_PATH)).status_code == 401
    for path in ("/console/", "/console/figures/", "/console/static/console.js"):
        assert (await guarded.http.get(path)).status_code in (401, 404)
    answer = await guarded.http.get(FIGURES_PATH, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200


# The page


ALL_DRAWN = """() => [...document.querySelectorAll("#figures article")].every(
  (article) => article.querySelector("path").getTotalLength() > 0)"""


@pytest.mark.full
@needs_chromium
async def test_the_page_draws_the_figures_and_plays_a_completion(trees: FleetRunner) -> None:
    program = chromium()
    assert program is not None
    async with browsing(program) as browser, client_of(trees) as client, under_load(client):
        page = await browser.new_page()
        page.set_default_timeout(1e3 * WAIT_S)
        problems = problems_of(page)
        await page.goto(trees.url)
        await page.wait_for_function(ALL_DRAWN)
        await page.wait_for_selector("#status[data-state=good]:has-text('drafting')")
        assert await page.locator("#replicas tbody tr").count() == 3
        await page.wait_for_selector("#replicas td:has-text('drafting')")

        await page.fill("#max_tokens", "60")
        await page.click("#run")
        await page.wait_for_selector("#verdict[data-state=good], #verdict[data-state=bad]")
        assert str(await page.text_content("#verdict")).startswith("Identical:")
        num_tokens = await page.locator("#with .token").count()
        assert num_tokens == await page.locator("#without .token.plain").count() > 1
        told = ", ".join(f"#with .token.{origin.name.lower()}" for origin in TokenOrigin)
        assert await page.locator(told).count() == num_tokens
        colours = await page.evaluate(
            """() => ["accepted", "recovered", "bonus"].map((name) =>
              getComputedStyle(document.querySelector(`.legend .${name}`)).backgroundColor)"""
        )
        assert len(set(colours)) == 3
        assert problems == []


@pytest.mark.full
@needs_chromium
async def test_the_page_of_the_api_asks_for_a_key_lists_the_paths_and_sends_a_request(guarded: ScriptedFleet) -> None:
    program = chromium()
    assert program is not None
    async with browsing(program) as browser:
        page = await browser.new_page()
        page.set_default_timeout(1e3 * WAIT_S)
        await page.goto(f"http://{guarded.addresses.http}/docs")
        await page.wait_for_selector("#key-form:not([hidden])")
        problems = problems_of(page)
        await page.fill("#key", KEY)
        await page.press("#key", "Enter")
        await page.wait_for_selector("#operations-default-createChatCompletion")
        documented = (await guarded.http.get(PATH, headers={"Authorization": f"Bearer {KEY}"})).json()["paths"]
        assert await page.locator(".opblock").count() == sum(map(len, documented.values()))
        await page.click("#operations-default-listModels button.opblock-summary-control")
        await page.click("#operations-default-listModels button.try-out__btn")
        await page.click("#operations-default-listModels button.execute")
        await page.wait_for_selector(
            "#operations-default-listModels .live-responses-table .response-col_status >> text=200"
        )
        assert problems == []


@pytest.mark.full
@needs_chromium
async def test_the_page_asks_for_a_key_and_keeps_it_to_itself(guarded: ScriptedFleet) -> None:
    program = chromium()
    assert program is not None
    async with browsing(program) as browser:
        page = await browser.new_page()
        page.set_default_timeout(1e3 * WAIT_S)
        await page.goto(f"http://{guarded.addresses.http}")
        await page.wait_for_selector("#key-form:not([hidden])")
        problems = problems_of(page)
        await page.fill("#key", KEY)
        await page.press("#key", "Enter")
        await page.wait_for_selector("#status[data-state=warn]:has-text('no drafter')")
        assert "No drafter is running" in str(await page.text_content("#notice"))
        assert problems == []
        kept = await page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert KEY not in kept
        assert KEY not in page.url
