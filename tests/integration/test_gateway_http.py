"""The HTTP door with the official client: text, streams, usage, logprobs, stop strings, samples, health."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.params import SpeculationParams
from paceline.gateway.api.openai.choices import sample_seed
from tests.support.scripted_fleet import (
    CONTEXT_LEN,
    EOS,
    MODEL,
    SHARES_A_GATEWAY,
    Script,
    ScriptedFleet,
    scripted_fleet,
)

pytestmark = SHARES_A_GATEWAY

SPECULATION = {
    "mean_acceptance_length": 3.0,
    "draft_acceptance_rate": 6 / 9,
    "acceptance_histogram": [0, 1, 1, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 9,
    "num_steps": 4,
    "mean_batch_size": 1.5,
    "num_hits": 2,
    "num_misses": 1,
    "lossy": False,
    "exact": True,
}


async def test_a_completion_carries_text_usage_and_the_speculation_record(fleet: ScriptedFleet) -> None:
    answer = await fleet.openai.completions.create(model=MODEL, prompt="the fox", max_tokens=10, seed=2)
    prompt = fleet.codec.encode("the fox", field="prompt", special_tokens=True, context_len=99)
    assert answer.choices[0].text == fleet.letters(2, 10, "the fox")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == len(prompt) + 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.to_dict()["metrics"] == {"speculative_decoding": SPECULATION}
    assert fleet.verifier.requests[0].prompt_token_ids == prompt
    assert fleet.verifier.abandoned.empty()


async def test_a_streamed_completion_joins_to_the_same_text_and_ends_with_usage(fleet: ScriptedFleet) -> None:
    stream = await fleet.openai.completions.create(
        model=MODEL,
        prompt="the fox",
        max_tokens=10,
        seed=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == fleet.letters(2, 10, "the fox")
    assert [choice.finish_reason for chunk in chunks[-3:] for choice in chunk.choices] == [None, "length"]
    assert [chunk.usage is not None for chunk in chunks[-3:]] == [False, False, True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].to_dict()["metrics"] == {"speculative_decoding": SPECULATION}
    assert chunks[-2].to_dict()["metrics"] == {"speculative_decoding": SPECULATION}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_events_are_framed_as_server_sent_events_and_end_with_done(fleet: ScriptedFleet) -> None:
    request = {"model": MODEL, "prompt": "a", "max_tokens": 4, "stream": True}
    answer = await fleet.http.post("/v1/completions", json=request)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    assert all(json.loads(event[6:])["object"] == "text_completion" for event in events[:-2])


async def test_a_chat_carries_a_message_of_the_assistant(fleet: ScriptedFleet) -> None:
    answer = await fleet.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_completion_tokens=5, seed=0
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    prompt = fleet.verifier.requests[0].prompt_token_ids
    assert answer.choices[0].message.content == fleet.letters(0, 5, prompt)
    assert (
        b"".join(fleet.codec.token_bytes(token_id) for token_id in prompt)
        == b"<|begin|><|user|>hello<|end|><|assistant|>"
    )


async def test_a_streamed_chat_first_says_who_speaks(fleet: ScriptedFleet) -> None:
    stream = await fleet.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=5, seed=0, stream=True
    )
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert deltas[0].role == "assistant"
    prompt = fleet.verifier.requests[0].prompt_token_ids
    assert "".join(delta.content or "" for delta in deltas) == fleet.letters(0, 5, prompt)


async def test_a_stop_string_over_token_borders_ends_the_text_and_the_verifiers_work(
    fleet: ScriptedFleet,
) -> None:
    fleet.verifier.script = Script(pause_after=9)
    text = fleet.letters(0, 7)
    answer = await fleet.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=100, seed=0, stop=["ZZZ", text[4:]]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[:4], "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.to_dict()["metrics"] == {"speculative_decoding": None}
    assert await fleet.verifier.abandoned.get() == fleet.verifier.requests[0].session_id


@pytest.mark.parametrize("door", ["/v1/completions", "/v1/chat/completions"])
async def test_a_choice_names_what_stopped_it_as_vllm_does(fleet: ScriptedFleet, door: str) -> None:
    """vLLM PR #2976: the stop string or the token of the request, null for the model's own end and for lengths."""
    asked = {"max_tokens": 9, "seed": 0, "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    asked.pop("messages" if door == "/v1/completions" else "prompt")
    await fleet.http.post(door, json=asked)
    prompt = fleet.verifier.requests[0].prompt_token_ids
    third = fleet.letter_ids(0, 3, prompt)[2]
    [letter] = fleet.letters(0, 3, prompt)[2:]
    for fields, reason in (
        ({"stop": [letter]}, letter),
        ({"stop_token_ids": [third]}, third),
        ({"stop_token_ids": [EOS]}, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, EOS),
        ({}, None),
    ):
        fleet.verifier.script = Script(stop_after=5 if EOS in fields.get("stop_token_ids", ()) else None)
        whole = (await fleet.http.post(door, json={**asked, **fields})).json()["choices"][0]
        assert whole["stop_reason"] == reason
        streamed = await fleet.http.post(door, json={**asked, **fields, "stream": True})
        *chunks, last = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert {chunk["choices"][0]["stop_reason"] for chunk in chunks} == {None}
        assert last["choices"][0]["stop_reason"] == reason


async def test_completion_logprobs_name_tokens_offsets_and_alternatives(fleet: ScriptedFleet) -> None:
    answer = await fleet.openai.completions.create(model=MODEL, prompt="x", max_tokens=4, seed=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list(fleet.letters(0, 4))
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs is not None
    [first] = fleet.letter_ids(0, 1)
    texts = [fleet.codec.decode([token_id]) for token_id in (first, first + 1)]
    assert logprobs.top_logprobs[0] == dict(zip(texts, [-0.5, -1.5], strict=True))


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs_spell_the_bytes_of_every_token(fleet: ScriptedFleet, streamed: bool) -> None:
    request: Any = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 4,
        "seed": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    if streamed:
        stream = await fleet.openai.chat.completions.create(**request, stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
    else:
        choices = (await fleet.openai.chat.completions.create(**request)).choices
    content = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    text = fleet.letters(0, 4, fleet.verifier.requests[0].prompt_token_ids)
    assert [token.token for token in content] == list(text)
    assert [token.bytes for token in content] == [[ord(letter)] for letter in text]
    assert content[0].top_logprobs[0].logprob == -0.5


@pytest.mark.parametrize("streamed", [False, True])
async def test_two_samples_have_their_own_seeds_and_count_the_prompt_once(fleet: ScriptedFleet, streamed: bool) -> None:
    request: Any = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 7, "seed": 3, "n": 2}
    texts = {0: "", 1: ""}
    if streamed:
        stream = await fleet.openai.completions.create(**request, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        answer = await fleet.openai.completions.create(**request)
        usage = answer.usage
        texts = {choice.index: choice.text for choice in answer.choices}
    assert texts == {0: fleet.letters(3, 7, [5, 6, 7]), 1: fleet.letters(sample_seed(3, 1), 7, [5, 6, 7])}
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 14)


async def test_several_prompts_are_answered_in_their_order(fleet: ScriptedFleet) -> None:
    answer = await fleet.openai.completions.create(model=MODEL, prompt=[[5], [6, 7], [5]], max_tokens=2, seed=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 4
    metrics = answer.to_dict()["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["speculative_decoding"]["num_draft_tokens"] == 27
    assert metrics["speculative_decoding"]["mean_batch_size"] == 1.5


async def test_usage_can_be_asked_for_in_every_chunk(fleet: ScriptedFleet) -> None:
    stream = await fleet.openai.completions.create(
        model=MODEL,
        prompt="x",
        max_tokens=7,
        stream=True,
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    usages = [chunk.usage async for chunk in stream if chunk.usage]
    assert [each.completion_tokens for each in usages] == [3, 6, 7, 7, 7]
    assert all(each.total_tokens == each.prompt_tokens + each.completion_tokens for each in usages)
    assert len({tuple(each.to_dict()) for each in usages}) == 1, "each says all"


async def test_what_a_request_says_of_speculation_reaches_the_verifier(fleet: ScriptedFleet) -> None:
    await fleet.openai.completions.create(
        model=MODEL, prompt="x", extra_body={"speculation": {"enabled": False, "max_draft_tokens": 3}}
    )
    expected = SpeculationParams(enabled=False, max_draft_tokens=3)
    assert fleet.verifier.requests[0].speculation == expected


async def test_a_request_that_names_no_model_is_served_by_the_only_one(fleet: ScriptedFleet) -> None:
    answer = await fleet.http.post("/v1/completions", json={"prompt": "x", "seed": 0, "max_tokens": 3})
    assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (MODEL, fleet.letters(0, 3))


async def test_models_are_listed_with_their_context(fleet: ScriptedFleet) -> None:
    [model] = [model async for model in fleet.openai.models.list()]
    assert (model.id, model.to_dict()["max_model_len"]) == (MODEL, CONTEXT_LEN)
    card = (await fleet.openai.models.retrieve(MODEL)).to_dict()
    # vLLM's bench takes the tokenizer of `root` where it is given no model.
    assert (card["id"], card["root"], card["parent"]) == (MODEL, MODEL, None)
    assert [each["object"] for each in card["permission"]] == ["model_permission"]


async def test_health_and_metrics_answer(fresh_fleet: ScriptedFleet) -> None:
    await fresh_fleet.openai.completions.create(model=MODEL, prompt="x", max_tokens=10)
    health = (await fresh_fleet.http.get("/health")).json()
    assert health == {
        "status": "ok",
        "store": "ok",
        "tasks": "ok",
        "keys": "ok",
        "models": "ok",
        "verifiers": 1,
        "drafters": 0,
        "sessions": 0,
    }
    metrics = (await fresh_fleet.http.get("/metrics")).text
    assert 'vllm:generation_tokens_total{model_name="tiny"} 10.0' in metrics
    assert 'vllm:spec_decode_num_drafts_total{model_name="tiny"} 3.0' in metrics
    assert 'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"} 9.0' in metrics
    assert 'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"} 6.0' in metrics
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="0"} 3.0' in metrics
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in metrics


async def test_every_request_that_fails_is_counted_by_the_type_of_its_error(fresh_fleet: ScriptedFleet) -> None:
    for body in ({"prompt": 3.5}, {"prompt": "x", "model": "strange"}, {"prompt": "x", "n": 1000}):
        assert (await fresh_fleet.http.post("/v1/completions", json=body)).status_code in (400, 404)
    lines = (await fresh_fleet.http.get("/metrics")).text.splitlines()
    counts = {line for line in lines if line.startswith("paceline:request_errors_total") and not line.endswith(" 0.0")}
    assert counts == {
        'paceline:request_errors_total{type="InvalidRequestError"} 2.0',
        'paceline:request_errors_total{type="ModelNotFoundError"} 1.0',
    }


async def gauges(fleet: ScriptedFleet) -> tuple[str, str]:
    """Sessions that run and that wait, as a scraper sees them."""
    lines = (await fleet.http.get("/metrics")).text.splitlines()
    values = dict(
        line.replace(f'{{model_name="{MODEL}"}}', "").split() for line in lines if line.startswith("vllm:num")
    )
    return values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]


@pytest.mark.parametrize(("pause_after", "shown"), [(0, ("1.0", "1.0")), (3, ("1.0", "0.0"))])
async def test_a_session_waits_until_its_first_token(
    fleet: ScriptedFleet, pause_after: int, shown: tuple[str, str]
) -> None:
    fleet.verifier.script = Script(pause_after=pause_after)
    asking = asyncio.create_task(fleet.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9}))
    session_id = await fleet.verifier.paused.get()
    while (found := await gauges(fleet)) != shown and pause_after:
        # The tokens of its first step may still be on their way.
        assert found == ("1.0", "1.0")
    assert found == shown
    fleet.verifier.script = Script()
    fleet.verifier.resume(session_id)
    assert (await asking).status_code == 200
    assert await gauges(fleet) == ("0.0", "0.0")


COMMENT = ": ping\n\n"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 12}


@pytest.mark.parametrize(
    ("door", "body", "ping"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 12}, COMMENT),
        ("/v1/chat/completions", CHAT, COMMENT),
        ("/v1/responses", {"input": "x", "max_output_tokens": 12}, COMMENT),
        ("/v1/messages", CHAT, 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
async def test_a_stream_that_waits_or_pauses_sends_pings(tmp_path: Path, door: str, body: Any, ping: str) -> None:
    """Behind nginx, which waits 60 s by default, streams that waited for a place got 504."""
    async with scripted_fleet(tmp_path, stream_ping_s=0.05) as fleet:
        fleet.verifier.script = Script(pause_after=0)
        async with fleet.http.stream("POST", door, json={"model": MODEL, **body, "stream": True}) as answer:
            assert answer.status_code == 200
            texts = answer.aiter_text()
            told = await anext(texts)
            assert told == ping
            session_id = await fleet.verifier.paused.get()
            fleet.verifier.step(session_id)
            while '"model"' not in told or not told.endswith(ping):
                told += await anext(texts)
            fleet.verifier.script = Script()
            fleet.verifier.resume(session_id)
            told += "".join([each async for each in texts])
    last = told.rstrip().rsplit("data: ", 1)[1]
    assert last == "[DONE]" or json.loads(last)["type"] in ("response.incomplete", "message_stop")


async def test_clients_take_pings_for_nothing(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, stream_ping_s=0.02) as fleet:
        fleet.verifier.script = Script(pause_after=0)
        asked = fleet.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], max_tokens=6, seed=2, stream=True
        )
        # Its head comes with the first ping.
        stream = await asked
        session_id = await fleet.verifier.paused.get()
        fleet.verifier.script = Script()
        fleet.verifier.resume(session_id)
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_session_record_is_written_in_the_background(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        await fleet.openai.completions.create(model=MODEL, prompt=[5, 6], max_tokens=7, seed=9)
        session_id = fleet.verifier.requests[0].session_id
    logged = await fleet.store.session(session_id)
    assert logged is not None
    record = logged.record
    assert logged.token_ids[:2] == (5, 6)
    assert (record.model, record.verifier_id) == (MODEL, "verifier-0")
    assert (record.prompt_len, record.committed_len, record.state) == (2, 7, "length")


async def test_an_echoed_prompt_comes_before_the_text_and_its_likelihoods_before_all(fleet: ScriptedFleet) -> None:
    asked: Any = {"model": MODEL, "prompt": "the fox", "max_tokens": 4, "seed": 0, "echo": True, "logprobs": 1}
    whole = (await fleet.openai.completions.create(**asked)).choices[0]
    [request] = fleet.verifier.requests
    prompt = request.prompt_token_ids
    text = whole.text.removeprefix("the fox")
    assert len(text) == 4
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs == [None, *[-0.25] * (len(prompt) - 1), *[-0.5] * 4]
    begin, *others = whole.logprobs.tokens or ()
    assert (begin, "".join(others)) == ("<|begin|>", whole.text), "special tokens have no text"
    assert whole.logprobs.text_offset == [0, *(len("".join(others[:index])) for index in range(len(others)))]
    stream = await fleet.openai.completions.create(**asked, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    streamed = [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.token_logprobs or ()]
    assert streamed == whole.logprobs.token_logprobs


async def test_of_a_prompt_alone_nothing_generated_is_told(fleet: ScriptedFleet) -> None:
    answer = await fleet.openai.completions.create(
        model=MODEL, prompt="the fox", max_tokens=0, echo=True, logprobs=0, extra_body={"return_token_ids": True}
    )
    told: Any = answer.choices[0]
    assert (told.text, told.finish_reason, told.token_ids) == ("the fox", "length", [])
    assert len(told.logprobs.tokens) == len(told.prompt_token_ids) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


async def test_prompt_log_probabilities_come_by_token_ids_with_ranks(fleet: ScriptedFleet) -> None:
    message = {"role": "user", "content": "x"}
    chat = (await fleet.http.post("/v1/chat/completions", json={"messages": [message], "prompt_logprobs": 2})).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    nothing, first, *_ = chat["prompt_logprobs"]
    assert nothing is None
    token_id = fleet.verifier.requests[0].prompt_token_ids[1]
    assert first[str(token_id)]["logprob"] == -0.25
    assert [each["rank"] for each in first.values()] == [1, 2]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_record_is_there_although_a_stop_string_ended_the_session(
    fleet: ScriptedFleet, streamed: bool
) -> None:
    fleet.verifier.script = Script(records=True, pause_after=9)
    text = fleet.letters(0, 12)
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 100, "seed": 0, "stop": text[7:9]}
    if streamed:
        chunks = [chunk async for chunk in await fleet.openai.completions.create(**asked, stream=True)]
        answer: Any = chunks[-1]
    else:
        answer = await fleet.openai.completions.create(**asked)
    record = answer.metrics["speculative_decoding"]
    # Three steps of three tokens: the last one has the stop string.
    assert (record["num_steps"], record["num_draft_tokens"], record["acceptance_histogram"]) == (3, 12, [0, 0, 3])
