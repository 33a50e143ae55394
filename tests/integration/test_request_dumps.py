"""Whole request models of other libraries, dumped with all their defaults, and what else asks for nothing."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, ScriptedFleet

pytestmark = SHARES_A_GATEWAY

USER = {"role": "user", "content": "hello"}
TEXT, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
NEEDED: dict[str, Any] = {
    TEXT: {"model": MODEL, "prompt": "x", "max_tokens": 3},
    CHAT: {"model": MODEL, "messages": [USER], "max_tokens": 3},
    RESPONSES: {"model": MODEL, "input": "hello", "max_output_tokens": 3},
    MESSAGES: {"model": MODEL, "messages": [USER], "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": [USER]},
    "/tokenize": {"model": MODEL, "prompt": "x"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
}
_VLLM_SAMPLING = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": None,
    "length_penalty": 1.0,
    "n": 1,
    "seed": None,
    "stop": [],
    "stream": False,
    "stream_options": None,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "use_beam_search": False,
    "stop_token_ids": [],
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "logit_bias": None,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "prompt_logprobs": None,
    "response_format": None,
    "structured_outputs": None,
    "priority": 0,
    "request_id": "abc",
    "logits_processors": None,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "cache_salt": None,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "best_of": None,
    "user": None,
}
_VLLM_CHAT = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "mm_processor_kwargs": None,
    "tools": None,
}
# The defaults of vLLM's request models, as its public source has them.
VLLM: dict[str, Any] = {
    TEXT: {**_VLLM_SAMPLING, "echo": False, "logprobs": None, "suffix": None, "prompt_embeds": None,
           "add_special_tokens": True},
    CHAT: {**_VLLM_SAMPLING, **_VLLM_CHAT, "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None,
           "tool_choice": "none", "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": False,
           "echo": False, "documents": None, "media_io_kwargs": None},
    RESPONSES: {"background": False, "include": None, "instructions": None, "max_tool_calls": None, "metadata": None,
                "logit_bias": None, "parallel_tool_calls": True, "previous_response_id": None, "prompt": None,
                "reasoning": None, "service_tier": "auto", "store": True, "stream": False, "temperature": None,
                "text": None, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": None, "top_k": None,
                "truncation": "disabled", "user": None, "skip_special_tokens": True, "request_id": "resp_abc",
                "include_stop_str_in_output": False, "prompt_cache_key": None, "mm_processor_kwargs": None,
                "priority": 0, "cache_salt": None, "enable_response_messages": False,
                "previous_input_messages": None, "structured_outputs": None, "seed": None, "stop": []},
    MESSAGES: {"metadata": None, "stop_sequences": None, "stream": False, "system": None, "temperature": None,
               "tool_choice": None, "tools": None, "top_k": None, "top_p": None},
    "/v1/messages/count_tokens": {"system": None, "tool_choice": None, "tools": None},
    "/tokenize": {"add_special_tokens": True, "return_token_strs": False},
    "/detokenize": {},
}  # fmt: skip
# LiteLLM's own defaults of chats, once with the empty texts and lists of its older releases.
LITELLM = [
    {"functions": [], "function_call": "", "user": "", "n": None, "stop": None, "stream": None, "logprobs": None},
    {"tools": None, "tool_choice": None, "top_logprobs": None, "stream_options": None, "extra_headers": None,
     "drop_params": None, "modalities": None, "prediction": None, "audio": None, "web_search_options": None,
     "verbosity": None, "thinking": None, "reasoning_effort": None, "parallel_tool_calls": None},
]  # fmt: skip
# What OpenAI's reference names as defaults; all other members of its client's models count as null.
OPENAI = {
    TEXT: (
        completion_create_params.CompletionCreateParamsNonStreaming,
        {"best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": None, "n": 1, "suffix": None, "top_p": 1},
    ),
    CHAT: (
        chat_create_params.CompletionCreateParamsNonStreaming,
        {"logprobs": False, "modalities": ["text"], "n": 1, "parallel_tool_calls": True, "service_tier": "auto",
         "store": False, "verbosity": "medium", "tool_choice": "none", "response_format": {"type": "text"}},
    ),
    RESPONSES: (
        response_create_params.ResponseCreateParamsNonStreaming,
        {"background": False, "include": [], "parallel_tool_calls": True, "service_tier": "auto", "store": True,
         "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "top_logprobs": 0,
         "truncation": "disabled", "tool_choice": "auto", "reasoning": {"effort": None, "summary": None}},
    ),
}  # fmt: skip
DUMPS = [
    *((path, dump) for path, dump in VLLM.items()),
    ("/tokenize", {"prompt": None, "messages": [USER], **_VLLM_CHAT, "return_token_strs": False}),
    *((CHAT, dump) for dump in LITELLM),
    *((path, {**dict.fromkeys(typing.get_type_hints(kind)), **told}) for path, (kind, told) in OPENAI.items()),
]
# What asks for nothing beside others, or without them.
NEUTRAL = [
    (CHAT, {"logprobs": False, "top_logprobs": 0}),
    (CHAT, {"top_logprobs": 0}),
    (CHAT, {"stream_options": {}}),
    (TEXT, {"stream_options": {"include_usage": False}}),
    (TEXT, {"prompt_logprobs": 0, "stream": True}),
    (TEXT, {"suffix": "", "functions": [], "documents": []}),
    (RESPONSES, {"context_management": [], "conversation": "", "top_logprobs": 0}),
    (MESSAGES, {"container": "", "stop_sequences": [], "tools": []}),
]
SPELLED = [
    (TEXT, {"stream": "true", "max_tokens": "3", "temperature": "0.5", "seed": "42", "stop_token_ids": ["5"]}),
    (TEXT, {"n": "2", "logit_bias": {"5": "-1.5"}, "best_of": "1", "use_beam_search": "False", "logprobs": "2"}),
    (CHAT, {"stream": "True", "stream_options": {"include_usage": "true"}, "speculation": {"enabled": "false"}}),
    (RESPONSES, {"max_output_tokens": "3", "store": "false", "top_p": "1"}),
    (MESSAGES, {"max_tokens": "3", "stream": "false"}),
    ("/tokenize", {"add_special_tokens": "false"}),
    ("/detokenize", {"tokens": ["1", 2]}),
]


@pytest.mark.parametrize(("path", "fields"), [*DUMPS, *NEUTRAL, *SPELLED])
async def test_what_asks_for_nothing_that_is_not_served_is_served(fleet: ScriptedFleet, path: str, fields: Any) -> None:
    """Issue 47.20 and 47.24: checks by presence refused dumps of vLLM's own models, and strictness published guides."""
    needed = {name: value for name, value in NEEDED[path].items() if fields.get(name) is None}
    answer = await fleet.http.post(
        path, json={**fields, **needed, **({"prompt": None} if "messages" in fields else {})}
    )
    assert answer.status_code == 200, answer.text


async def test_a_text_that_spells_a_value_is_that_value(fleet: ScriptedFleet) -> None:
    for fields in ({"temperature": 0.5, "seed": 42, "max_tokens": 3}, {"temperature": "0.5", "seed": "42"}):
        assert (await fleet.http.post(TEXT, json={**NEEDED[TEXT], **fields})).status_code == 200
    plain, spelled = fleet.verifier.requests
    assert plain.sampling == spelled.sampling


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": "three"}, {"max_tokens": "3.5"}, {"max_tokens": "true"}, {"stream": "yes"}, {"stream": 1},
     {"temperature": "NaN"}, {"temperature": "1e999"}, {"logprobs": "many"}, {"seed": "9" * 41}],
)  # fmt: skip
async def test_what_spells_no_value_is_refused(fleet: ScriptedFleet, fields: Any) -> None:
    refused = await fleet.http.post(TEXT, json={**NEEDED[TEXT], **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))


async def test_what_asks_for_something_is_refused_where_it_is_not_served(fleet: ScriptedFleet) -> None:
    for path, fields in (
        (CHAT, {"top_logprobs": 1}),
        (CHAT, {"stream_options": {"include_usage": True}}),
        (TEXT, {"prompt_logprobs": 1, "stream": True}),
        (CHAT, {"add_special_tokens": True}),
        (CHAT, {"web_search_options": {}}),
    ):
        refused = await fleet.http.post(path, json={**NEEDED[path], **fields})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(fields)))
