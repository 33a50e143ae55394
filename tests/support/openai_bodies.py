"""Bodies of completions and chats for a small model, and the sessions or refusals that they become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline.core.messages import ModelIdentity
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions, completion_sessions
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.body import parse_json_object
from paceline.gateway.http.errors import HttpError, to_http
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.chat_template import ChatTemplate
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer

CONTEXT_LEN = 64
TEMPLATE = ChatTemplate(tiny_tokenizer.CHAT_TEMPLATE, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
CODEC = TextCodec(tiny_tokenizer.train(), TEMPLATE)
MODEL = ServedModel(
    identity=ModelIdentity(
        name="tiny",
        vocab_hash="abc",
        vocab_size=CODEC.vocab_size,
        context_len=CONTEXT_LEN,
        eos_token_ids=(1,),
    ),
    codec=CODEC,
)
[LETTER] = CODEC.encode("a", field="", special_tokens=False, context_len=CONTEXT_LEN)
USER = [{"role": "user", "content": "the fox"}]


def completion(raw: bytes, *, model: ServedModel = MODEL) -> list[SessionRequest]:
    unknown = UnknownFields(strict=False)
    return completion_sessions(parse_body(CompletionBody, parse_json_object(raw), unknown), model, "cmpl-1", unknown)


def chat(raw: bytes, unknown: UnknownFields | None = None, *, model: ServedModel = MODEL) -> list[SessionRequest]:
    unknown = unknown or UnknownFields(strict=False)
    return chat_sessions(parse_body(ChatBody, parse_json_object(raw), unknown), model, "chatcmpl-1", unknown)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "the fox", **fields}).encode()


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": USER, **fields}).encode()


def refusal(raw: bytes, *, of_chat: bool = False) -> HttpError:
    with pytest.raises(PacelineError) as caught:
        (chat if of_chat else completion)(raw)
    return to_http(caught.value)
