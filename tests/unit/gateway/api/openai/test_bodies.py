"""Bad requests are refused with the right status, field and limit; strange fields are named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.body import parse_json_object
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer
from tests.support.openai_bodies import (
    MODEL,
    USER,
    body,
    chat,
    chat_body,
    completion,
    refusal,
)


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": -4}, "max_tokens", "at least 1, got -4"),
        ({"max_tokens": 1_000_000}, "max_tokens", "the context holds 64 tokens"),
        ({"max_tokens": "5.5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 5.5}, "max_tokens", "valid integer"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"temperature": -0.1}, "temperature", "from 0 to 100"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 2}, "top_p", "from 0 to 1"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"top_k": -7}, "top_k", "got -7"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
        ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ({"min_tokens": 20}, "min_tokens", "max_tokens (16)"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        (
            {"speculation": {"method": "Magic!"}},
            "speculation.method",
            "draft_model, eagle3, ngram, grammar, medusa, layer_skip",
        ),
        ({"speculation": {"method": "ngram+" * 1000}}, "speculation.method", "joined by +"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "limit of 128"),
        ({"seed": 2**64}, "seed", "2**64-1"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]", "from -100 to 100"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "token id"),
        ({"logit_bias": {"99999": 1}}, "logit_bias[0]", "outside the vocabulary"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", "at most 1024"),
        ({"stop_token_ids": [1, 99999]}, "stop_token_ids[1]", "outside the vocabulary"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids", "at most 64"),
        ({"stop": ["x"] * 10_000}, "stop", "at most 16"),
        ({"stop": ["ok", ""]}, "stop[1]", "1 to 256 characters"),
        ({"stop": "x" * 257}, "stop[0]", "1 to 256 characters"),
        ({"stop": ["ok", 5]}, "stop[1]", "must be a string"),
        ({"stop": 5}, "stop", "list of strings"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "must not be empty"),
        ({"prompt": [[]]}, "prompt[0]", "at least one token"),
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": 5}, "prompt", "must be a string"),
        ({"prompt": ["a", 5]}, "prompt[1]", "of one kind"),
        ({"prompt": [["a"]]}, "prompt[0]", "token ids"),
        ({"prompt": [1, 2, 99999]}, "prompt[2]", "token id 99999 is outside the vocabulary"),
        ({"prompt": [1, -2]}, "prompt[1]", "token id -2"),
        ({"prompt": [[1], [2, 99999]]}, "prompt[1][1]", "outside the vocabulary"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": ["a"] * 128, "n": 2}, "prompt", "limit of 128"),
        ({"prompt": [7] * 64}, "prompt", "64 tokens"),
        ({"prompt": "qz" * 40}, "prompt", "the context of 64 tokens"),
        ({"prompt": "a" * 4_000_000}, "prompt", "4000000 bytes"),
        ({"prompt": "half \ud800"}, "prompt", "Unicode"),
        ({"model": 5}, "model", "valid string"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"echo": 0}, "echo", "valid boolean"),
        # Whole numbers that no float can hold.
        ({"logprobs": 10**400}, "logprobs", "from 0 to 20"),
        ({"temperature": 10**400}, "temperature", "must be"),
        ({"speculation": {"max_draft_tokens": -(10**400)}}, "speculation.max_draft_tokens", "from 0 to 64"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend", "not supported"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"speculation": {"max_draft_tokens": 65}}, "speculation.max_draft_tokens", "from 0 to 64"),
        ({"speculation": {"acceptance": "Lucky!"}}, "speculation.acceptance", "coupled, rejection"),
        ({"speculation": True}, "speculation", "must be an object, got True"),
        ({"speculation": {"token_origins": "yes"}}, "speculation.token_origins", "valid boolean"),
        # Nobody else's field: an unknown one in it is a slip, and speculation would stay on.
        ({"speculation": {"enable": False}}, "speculation.enable", "is no field of speculation; enabled is"),
        ({"speculation": {"gamma": 4}}, "speculation.gamma", "there are enabled, max_draft_tokens"),
    ],
)
def test_a_bad_completion_field_is_named_with_its_limit(fields: dict[str, Any], param: str, limit: str) -> None:
    refused = refusal(body(**fields))
    assert refused.status == 400
    assert refused.type == "invalid_request_error"
    assert refused.param == param
    assert refused.message.startswith(f"{param}: ")
    assert limit in refused.message
    assert len(refused.message) < 400


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"messages": []}, "messages", "at least one"),
        ({"messages": None}, "messages", "is required"),
        ({"messages": "hello"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "must be 'text'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "no tools here"),
        ({"messages": [{"role": "user", "content": "qz" * 40}]}, "messages", "the context of 64 tokens"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "Unicode"),
        ({"max_tokens": 64}, "max_tokens", "the context holds 64 tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"logprobs": 2}, "logprobs", "valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"n": 1000}, "n", "at most 128"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be one of"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "set by the server"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
            "is required",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0].image_url",
            "not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].input_audio",
            "not supported",
        ),
    ],
)
def test_a_bad_chat_field_is_named_with_its_limit(fields: dict[str, Any], param: str, limit: str) -> None:
    refused = refusal(chat_body(**fields), of_chat=True)
    assert (refused.status, refused.param) == (400, param)
    assert limit in refused.message


@pytest.mark.parametrize(
    ("raw", "param", "problem"),
    [
        (b"", "body", "not valid JSON"),
        (b"{", "body", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "a",}', "body", "line 1, column"),
        (b'\xef\xbb\xbf{"model": "tiny"}', "body", "not valid JSON"),
        (b'{"model": "tiny", "prompt": "\xff\xfe"}', "body", "not valid UTF-8"),
        (b'{"model": "tiny", "prompt": "\xe2\x82', "body", "not valid UTF-8"),
        (b"[1, 2]", "body", "must be a JSON object"),
        (b"null", "body", "must be a JSON object"),
        (b"[" * 100_000, "body", "nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "body", "not usable JSON"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature", "NaN is not a JSON number"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": NaN}}', "logit_bias.5", "NaN"),
        (b'{"model": "tiny", "prompt": [1, Infinity]}', "prompt[1]", "Infinity is not a JSON number"),
        (b'{"model": "tiny", "prompt": "a", "top_p": -Infinity}', "top_p", "-Infinity"),
        (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', "temperature", "got inf"),
        (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": 1e999}}', "logit_bias[5]", "got inf"),
    ],
)
def test_a_broken_body_is_refused_with_what_is_wrong(raw: bytes, param: str, problem: str) -> None:
    refused = refusal(raw)
    assert (refused.status, refused.param) == (400, param)
    assert problem in refused.message
    json.loads(refused.to_bytes())


def test_a_chat_with_a_model_that_has_no_template_is_refused() -> None:
    plain = ServedModel(identity=MODEL.identity, codec=TextCodec(tiny_tokenizer.train(), None))
    unknown = UnknownFields(strict=False)
    parsed = parse_body(ChatBody, parse_json_object(chat_body()), unknown)
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/completions"):
        chat_sessions(parsed, plain, "chatcmpl-1", unknown)


def test_fields_for_book_keeping_and_neutral_values_are_ignored() -> None:
    [session] = completion(body(user="me", metadata={"a": 1}, echo=False, best_of=1, suffix=None, stop=None, seed=3))
    assert session.sampling == SamplingParams(max_tokens=16, seed=3)
    assert session.speculation == SpeculationParams()
    assert session.stops == ()


@pytest.mark.parametrize(
    ("fields", "path", "known"),
    [
        ({"temprature": 1}, "temprature", {}),
        ({"messages": USER}, "messages", {}),
        ({"stream_options": {"usage": True}}, "stream_options.usage", {"stream_options": {}}),
    ],
)
def test_an_unknown_field_is_ignored_and_named_or_refused(
    fields: dict[str, Any], path: str, known: dict[str, Any]
) -> None:
    unknown, none = UnknownFields(strict=False), UnknownFields(strict=False)
    with_it, without = ({"prompt": "x", "stream": True, **each} for each in (fields, known))
    assert parse_body(CompletionBody, with_it, unknown) == parse_body(CompletionBody, without, none)
    assert (unknown.header, none.header) == (path, "")
    with pytest.raises(InvalidRequestError, match="is not a field of this endpoint") as caught:
        parse_body(CompletionBody, with_it, UnknownFields(strict=True))
    assert caught.value.field == path


def test_nulls_are_absent_at_every_depth_and_the_own_message_of_a_server_goes_back_in() -> None:
    nulls = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    answered = {"role": "assistant", "content": "jumps", "reasoning_content": None, "name": None, **nulls}
    part = {"type": "text", "text": "the fox", "cache_control": None}
    rich = chat_body(
        messages=[{"role": "user", "content": [part], "name": None}, answered, *USER],
        seed=1,
        stream=True,
        stream_options={"include_usage": None},
        speculation={"method": None, "enabled": None},
        response_format={"type": "text", "json_schema": None},
    )
    plain = chat_body(messages=[*USER, {"role": "assistant", "content": "jumps"}, *USER], seed=1, stream=True)
    assert chat(rich, UnknownFields(strict=True)) == chat(plain)


def test_fields_of_messages_and_parts_that_nobody_knows_are_named_with_their_place() -> None:
    unknown = UnknownFields(strict=False)
    part = {"type": "text", "text": "the fox", "colour": "red"}
    messages = [{"role": "user", "content": [part], "mood": "good"}, {**USER[0], "cache_control": "hm"}]
    chat(chat_body(messages=messages, thinking=1), unknown)
    assert unknown.header == "thinking, messages[0].mood, messages[0].content[0].colour, messages[1].cache_control"


def test_the_names_of_ignored_fields_are_bounded_and_fit_for_a_header() -> None:
    unknown = UnknownFields(strict=False)
    names = ["a,b\r\nset-cookie: x", "é\ud800", "", "x" * 1000, *(f"n{index}" for index in range(96))]
    parse_body(CompletionBody, {"prompt": "x", **dict.fromkeys(names, 1)}, unknown)
    first = ["a?b??set-cookie:?x", "??", "?", "x" * 64, *(f"n{index}" for index in range(16))]
    assert unknown.header == ", ".join([*first, "80 more"])
