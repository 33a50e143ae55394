"""What real clients send beside the fields served here: unknown fields, nulls, ids of requests, and the small doors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.core.prediction import MAX_PREDICTED_TOKENS
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody
from tests.support.scripted_fleet import CONTEXT_LEN, MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet, scripted_fleet

pytestmark = SHARES_A_GATEWAY

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IGNORED, REQUEST_ID = "x-paceline-ignored-fields", "x-request-id"
USER: Any = {"role": "user", "content": "hello"}
PROMPT = {"prompt": "x", "max_tokens": 3, "seed": 0}


async def test_a_message_of_ours_goes_back_in_as_the_official_client_got_it(fresh_fleet: ScriptedFleet) -> None:
    first = await fresh_fleet.openai.chat.completions.create(model=MODEL, messages=[USER], max_tokens=5, seed=0)
    answered: Any = first.choices[0].message.model_dump()
    assert answered["refusal"] is None
    whole = await fresh_fleet.openai.chat.completions.with_raw_response.create(
        model=MODEL, messages=[USER, {**answered, "reasoning_content": None, "name": None}, USER], max_tokens=5, seed=0
    )
    assert IGNORED not in whole.headers
    plain: Any = {"role": "assistant", "content": answered["content"]}
    await fresh_fleet.openai.chat.completions.create(model=MODEL, messages=[USER, plain, USER], max_tokens=5, seed=0)
    _, replayed, rewritten = fresh_fleet.verifier.requests
    assert replayed.prompt_token_ids == rewritten.prompt_token_ids


@pytest.mark.parametrize("streamed", [False, True])
async def test_unknown_fields_are_ignored_and_named(fresh_fleet: ScriptedFleet, streamed: bool) -> None:
    unknown = {"thinking": 1, "colour": {"a": [1]}}
    answer = await fresh_fleet.http.post(COMPLETIONS, json={**PROMPT, **unknown, "stream": streamed})
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "thinking, colour"
    plain = await fresh_fleet.http.post(COMPLETIONS, json=PROMPT)
    assert IGNORED not in plain.headers
    first, second = fresh_fleet.verifier.requests
    assert (first.prompt_token_ids, first.sampling) == (second.prompt_token_ids, second.sampling)


async def test_a_refused_request_names_ignored_fields_too(fleet: ScriptedFleet) -> None:
    answer = await fleet.http.post(COMPLETIONS, json={**PROMPT, "colour": 1, "max_tokens": 10_000})
    assert (answer.status_code, answer.headers[IGNORED]) == (400, "colour")


async def test_a_hundred_thousand_unknown_fields_make_a_short_header(fresh_fleet: ScriptedFleet) -> None:
    unknown = {f"field-{index}\r\nset-cookie: a=b": None if index % 2 else 1 for index in range(90_000)}
    answer = await fresh_fleet.http.post(COMPLETIONS, json={**PROMPT, **unknown})
    assert answer.status_code == 200
    assert answer.headers[IGNORED].endswith("field-38??set-cookie:?a=b, 44980 more")
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_prediction_reaches_the_verifier_and_usage_says_how_much_came_true(
    fleet: ScriptedFleet, streamed: bool
) -> None:
    """It was refused as if it changed the answer."""
    fields: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 12, "seed": 2}
    text = (await fleet.openai.chat.completions.create(**fields)).choices[0].message.content
    assert text is not None
    parts = [{"type": "text", "text": text + "and more"}]
    body = {**fields, "prediction": {"type": "content", "content": parts}, "stream": streamed}
    if streamed:
        body["stream_options"] = {"include_usage": True}
        chunks = [chunk async for chunk in await fleet.openai.chat.completions.create(**body)]
        usage = chunks[-1].usage
    else:
        usage = (await fleet.openai.chat.completions.create(**body)).usage
    predicted = fleet.verifier.requests[-1].speculation.predicted_token_ids
    assert fleet.codec.decode(predicted) == text + "and more"
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (12, len(predicted) - 12)


@pytest.mark.parametrize("content", ["", "x" * 600_000, None], ids=["empty", "long", "none"])
async def test_no_request_is_refused_for_its_prediction(fleet: ScriptedFleet, content: str | None) -> None:
    body = {"messages": [USER], "max_tokens": 2, "prediction": {"type": "content", "content": content}}
    assert (await fleet.http.post(CHAT, json=body)).status_code == 200
    assert (await fleet.http.post(COMPLETIONS, json={**PROMPT, "prediction": body["prediction"]})).status_code == 200
    assert len(fleet.verifier.requests[-1].speculation.predicted_token_ids) <= MAX_PREDICTED_TOKENS


async def test_strict_fields_refuses_what_is_unknown(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, strict_fields=True) as fleet:
        assert (await fleet.http.post(COMPLETIONS, json=PROMPT)).status_code == 200
        for path, body, field in (
            (COMPLETIONS, {**PROMPT, "colour": 1}, "colour"),
            (CHAT, {"messages": [{**USER, "mood": 1}]}, "messages[0].mood"),
            ("/tokenize", {"prompt": "x", "colour": 1}, "colour"),
        ):
            answer = await fleet.http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
            assert IGNORED not in answer.headers


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_has_the_request_id_of_the_client_or_its_own(fleet: ScriptedFleet, streamed: bool) -> None:
    async def asked(*given: str) -> tuple[str, str]:
        """The header, and the id in the answer."""
        headers = [(REQUEST_ID, each) for each in given]
        answer = await fleet.http.post(COMPLETIONS, json={**PROMPT, "stream": streamed}, headers=headers)
        told = answer.text.split("\n\n")[0].removeprefix("data: ") if streamed else answer.text
        return answer.headers[REQUEST_ID], json.loads(told)["id"]

    for given in ("mine 1", "~" * 128):
        assert (await asked(given))[0] == given
    for unusable in ((), ("",), ("~" * 129,), ("tab\tin it",)):
        header, own = await asked(*unusable)
        assert header == own


async def test_a_refusal_has_the_id_of_its_request_too(fleet: ScriptedFleet) -> None:
    refused = await fleet.http.post(COMPLETIONS, json={"prompt": 5}, headers={REQUEST_ID: "mine"})
    assert (refused.status_code, refused.headers[REQUEST_ID]) == (400, "mine")
    nameless = await fleet.http.post(COMPLETIONS, json={"prompt": 5})
    assert nameless.headers[REQUEST_ID].startswith("cmpl-")


async def test_a_failure_is_logged_under_the_request_id(fleet: ScriptedFleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.verifier.script = Script(step_len=3, gap=1)
    answer = await fleet.http.post(COMPLETIONS, json=PROMPT, headers={REQUEST_ID: "mine"})
    assert answer.status_code == 502
    assert "mine" in {vars(record).get("request_id") for record in caplog.records}


async def test_a_prompt_and_a_chat_are_tokenized_as_they_are_when_served(fleet: ScriptedFleet) -> None:
    await fleet.http.post(COMPLETIONS, json=PROMPT)
    await fleet.http.post(CHAT, json={"messages": [USER], "max_tokens": 1})
    for body, request in zip(({"prompt": "x"}, {"messages": [USER]}), fleet.verifier.requests, strict=True):
        told = (await fleet.http.post("/tokenize", json={"model": MODEL, **body})).json()
        tokens = list(request.prompt_token_ids)
        assert told == {"count": len(tokens), "max_model_len": CONTEXT_LEN, "tokens": tokens, "token_strs": None}


async def test_tokens_are_told_as_the_vocabulary_spells_them(fleet: ScriptedFleet) -> None:
    for body in ({"prompt": "hello"}, {"messages": [USER]}):
        told = (await fleet.http.post("/tokenize", json={**body, "return_token_strs": True})).json()
        assert told["token_strs"][0] == "<|begin|>"
        assert [fleet.codec.piece(each) for each in told["tokens"]] == told["token_strs"]


async def test_a_prompt_begins_with_special_tokens_or_not(fleet: ScriptedFleet) -> None:
    for fields in ({}, {"add_special_tokens": False}):
        await fleet.http.post(COMPLETIONS, json={**PROMPT, **fields})
    with_it, without = fleet.verifier.requests
    assert with_it.prompt_token_ids == (fleet.codec.added_token_id("<|begin|>"), *without.prompt_token_ids)


async def test_tokens_become_the_text_again_with_its_special_tokens(fleet: ScriptedFleet) -> None:
    tokens = (await fleet.http.post("/tokenize", json={"messages": [USER]})).json()["tokens"]
    told = (await fleet.http.post("/detokenize", json={"tokens": tokens})).json()
    assert told == {"prompt": "<|begin|><|user|>hello<|end|><|assistant|>"}
    bare = (await fleet.http.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})).json()
    assert (await fleet.http.post("/detokenize", json={"tokens": bare["tokens"]})).json() == {"prompt": "hello"}
    assert (await fleet.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "qz" * CONTEXT_LEN}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, 400, "tools[0].function"),
        ("/tokenize", {"prompt": "x", "model": "strange"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 5 * 1024 * 1024}, 413, "body"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 2.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 2**32]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1] * (CONTEXT_LEN + 1)}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_name(
    fleet: ScriptedFleet, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await fleet.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_small_doors_say_version_load_and_health(fleet: ScriptedFleet) -> None:
    assert (await fleet.http.get("/version")).json() == {"version": paceline.__version__}
    health = (await fleet.http.get("/health")).json()
    for method in ("GET", "POST"):
        answer = await fleet.http.request(method, "/ping")
        assert (answer.status_code, answer.json()) == (200, health)
    assert (await fleet.http.get("/load")).json() == {"server_load": 0}
    fleet.verifier.script = Script(pause_after=3)
    async with fleet.http.stream("POST", COMPLETIONS, json={**PROMPT, "max_tokens": 9, "stream": True}):
        assert (await fleet.http.get("/load")).json() == {"server_load": 1}


async def test_no_field_is_known_and_unknown_at_once() -> None:
    for kind in (CompletionBody, ChatBody):
        assert not set(kind.model_fields) & (kind.no_effect | set(kind.not_served))
