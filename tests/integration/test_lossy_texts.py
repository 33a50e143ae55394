"""The mark of a text whose distribution is not the target's."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.rpc.v1 import common_pb2, gateway_pb2
from tests.support.scripted_fleet import MODEL, Script, scripted_fleet


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
