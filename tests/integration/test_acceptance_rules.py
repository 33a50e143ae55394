"""The acceptance rules over a whole fleet, what is refused, and the mark of a lossy text."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec
from paceline.core.params import ACCEPTANCE_RULES, COUPLED, REJECTION
from paceline.rpc.v1 import common_pb2, gateway_pb2
from paceline.service.config import load
from tests.integration.test_local_fleet import arguments
from tests.support.scripted_fleet import MODEL, Script, scripted_fleet

PROMPT = "hello, hello, hello"
BODY = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0.7, "seed": 3, "ignore_eos": True}


async def answered(http: httpx.AsyncClient, **speculation: Any) -> dict[str, Any]:
    """The first answer that drafts were accepted for; a stream to a drafter takes its time to come up."""
    async with asyncio.timeout(60):
        while True:
            response = await http.post("/v1/completions", json=BODY | {"speculation": speculation})
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                assert response.status_code == httpx.codes.OK, response.text
                answer: dict[str, Any] = response.json()
                if answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]:
                    assert answer["usage"]["completion_tokens"] == 60
                    return answer
            await asyncio.sleep(0.05)


@pytest.mark.full
async def test_a_fleet_serves_every_rule(tiny_pair: tuple[Path, Path]) -> None:
    """Its default is `rejection`; what a request says counts more."""
    served = {"method": "draft_model", "policy": "fixed", "num_speculative_tokens": 4}
    config = json.dumps(served | {"acceptance": REJECTION})
    spec = load(FleetSpec, [*arguments(tiny_pair), "--speculative-config", config], {}, "up", "")
    async with (
        LocalFleet(spec, environ=os.environ) as fleet,
        httpx.AsyncClient(base_url=fleet.gateway_url, trust_env=False, timeout=60) as http,
    ):
        asked: list[dict[str, Any]] = [{}, *({"acceptance": each} for each in ACCEPTANCE_RULES)]
        answers = {each.get("acceptance", ""): (await answered(http, **each)) for each in asked}
        assert not any(each["metrics"]["speculative_decoding"]["lossy"] for each in answers.values())
        texts = {rule: answer["choices"][0]["text"] for rule, answer in answers.items()}
        off = BODY | {"speculation": {"enabled": False, "acceptance": REJECTION}}
        plain = await http.post("/v1/completions", json=off)
        assert plain.json()["choices"][0]["text"] == texts[COUPLED], "nothing was accepted"
        refused = await http.post("/v1/completions", json=BODY | {"speculation": {"acceptance": "typical"}})
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "must be one of coupled, rejection, got 'typical'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("stopped", [False, True], ids=["to the end", "stopped by a text"])
async def test_a_lossy_text_is_marked_whoever_ends_it(tmp_path: Path, stopped: bool) -> None:
    """At a stop string the gateway ends the session, and gets no record from the verifier."""
    async with scripted_fleet(tmp_path) as fleet:
        fleet.verifier.script = Script(lossy=True)
        text = fleet.letters(0, 10)
        stop = text[4:7] if stopped else None
        body = {"model": MODEL, "prompt": "x", "seed": 0, "max_tokens": 10, "stop": stop}
        whole = (await fleet.http.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["text"] == (text[:4] if stopped else text)
        assert whole["metrics"]["speculative_decoding"]["lossy"] is True
        several = (await fleet.http.post("/v1/completions", json=body | {"n": 2})).json()
        assert several["metrics"]["speculative_decoding"]["lossy"] is True
        request = gateway_pb2.GatewayGenerateRequest(
            model=MODEL,
            prompt="x",
            sampling=common_pb2.SamplingParams(max_tokens=10, seed=0),
            stop=[stop] if stop else [],
        )
        messages = [message async for message in fleet.stub.Generate(request, timeout=30)]
        assert messages[-1].result.speculation.lossy
