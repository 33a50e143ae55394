"""How each token came about, as the gateway tells it where a request asks: names, texts and choices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.messages import TokenOrigin
from tests.support.scripted_fleet import SHARES_A_GATEWAY, Script, ScriptedFleet

pytestmark = SHARES_A_GATEWAY

ASK = {"prompt": "x", "seed": 0, "max_tokens": 7, "speculation": {"token_origins": True}}
# Steps of three tokens, by the script: two drafts and what followed them.
SEVEN = ["accepted", "accepted", "bonus"] * 2 + ["bonus"]


@pytest.fixture(autouse=True)
def told_by_the_verifier(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(own_origin=TokenOrigin.BONUS)


async def chunks(fleet: ScriptedFleet, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with fleet.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


async def test_a_whole_answer_names_each_tokens_text_and_origin(fleet: ScriptedFleet) -> None:
    choice = (await fleet.http.post("/v1/completions", json=ASK)).json()["choices"][0]
    assert [told["text"] for told in choice["token_origins"]] == list(fleet.letters(0, 7))
    assert [told["origin"] for told in choice["token_origins"]] == SEVEN


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_texts_of_a_chunks_tokens_join_to_its_text(fleet: ScriptedFleet, path: str) -> None:
    body = {**ASK, "messages": [{"role": "user", "content": "x"}]} if "chat" in path else ASK
    body = {name: value for name, value in body.items() if "chat" not in path or name != "prompt"}
    told = [choice for choice in await chunks(fleet, path, body) if choice.get("token_origins")]
    assert [each["origin"] for choice in told for each in choice["token_origins"]] == SEVEN
    for choice in told:
        text = choice["delta"]["content"] if "delta" in choice else choice["text"]
        assert "".join(each["text"] for each in choice["token_origins"]) == text


async def test_each_of_several_choices_has_its_own(fleet: ScriptedFleet) -> None:
    told: dict[int, str] = {0: "", 1: ""}
    for choice in await chunks(fleet, "/v1/completions", {**ASK, "n": 2}):
        told[choice["index"]] += "".join(each["text"] for each in choice.get("token_origins", ()))
    whole = (await fleet.http.post("/v1/completions", json={**ASK, "n": 2})).json()
    assert told == {choice["index"]: choice["text"] for choice in whole["choices"]}


async def test_tokens_of_a_stop_string_count_and_have_no_text(fleet: ScriptedFleet) -> None:
    text = fleet.letters(0, 5)
    answer = (await fleet.http.post("/v1/completions", json={**ASK, "stop": text[3:]})).json()
    [choice] = answer["choices"]
    assert [each["text"] for each in choice["token_origins"]] == [*text[:3], "", ""]
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_verifier_that_does_not_tell_leaves_the_origin_open(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script()
    choice = (await fleet.http.post("/v1/completions", json=ASK)).json()["choices"][0]
    assert [each["origin"] for each in choice["token_origins"]] == [None] * 7


async def test_who_does_not_ask_is_told_nothing(fleet: ScriptedFleet) -> None:
    plain = {**ASK, "speculation": {}}
    assert "token_origins" not in (await fleet.http.post("/v1/completions", json=plain)).json()["choices"][0]
    assert not any("token_origins" in choice for choice in await chunks(fleet, "/v1/completions", plain))
