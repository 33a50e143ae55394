"""A gateway that reaches the store and no verifier."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.gateway.fleet import verifier_health as module
from tests.support.scripted_fleet import MODEL, WAIT_S, scripted_fleet, verifier_server


async def test_a_gateway_that_reaches_no_verifier_is_not_ready_until_one_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second audit: the registry was well, no verifier could be reached, and every request failed: ready."""
    monkeypatch.setattr(module, "UNREACHABLE_S", 0.1)
    async with scripted_fleet(tmp_path) as fleet, asyncio.timeout(WAIT_S):
        [server] = fleet.servers
        await server.stop(0)
        answer = await fleet.http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 3})
        assert answer.status_code == 503
        while (ready := await fleet.http.get("/readyz")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        report = ready.json()
        assert (report["status"], report["store"], report["verifiers"]) == ("verifiers unreachable", "ok", 1)
        assert "none of its verifiers can be reached" in report["models"][MODEL]
        # Nobody sends it requests now: it finds out by itself.
        fleet.servers[0] = await verifier_server(fleet.verifier, server.port)
        await fleet.servers[0].ready("verifier-0")
        while (await fleet.http.get("/readyz")).status_code == 503:  # noqa: ASYNC110 - health tells nobody
            await asyncio.sleep(0.02)
