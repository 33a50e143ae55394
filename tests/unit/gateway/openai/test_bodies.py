"""Bad requests are refused with the right status, field and limit; good ones become the right sessions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.messages import ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.generation_config import ModelDefaults
from paceline.gateway.http.body import parse_json_object
from paceline.gateway.http.errors import HttpError, to_http
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.openai.bodies import ChatBody, CompletionBody, parse_body
from paceline.gateway.openai.choices import chat_sessions, completion_sessions
from paceline.gateway.requests import ServedModel, SessionRequest, sample_seed
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
    return completion_sessions(parse_body(CompletionBody, parse_json_object(raw), unknown), model, "cmpl-1")


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


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_tokens": -4}, "max_tokens", "at least 1, got -4"),
        ({"max_tokens": 1_000_000}, "max_tokens", "the context holds 64 tokens"),
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
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
            "draft_model, eagle3, ngram, suffix, grammar, medusa, layer_skip",
        ),
        ({"speculation": {"method": "ngram+" * 1000}}, "speculation.method", "at most 64 characters"),
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
        ({"speculation": {"acceptance": "Lucky!"}}, "speculation.acceptance", "coupled, rejection, block, typical"),
        ({"speculation": True}, "speculation", "must be"),
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
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tools here"),
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
        (
            {"speculation": {"enable": True, "method": "ngram"}},
            "speculation.enable",
            {"speculation": {"method": "ngram"}},
        ),
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
    part = {"type": "text", "text": "the fox", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part], "mood": "good"}, {**USER[0], "refusal": "hm"}]
    chat(chat_body(messages=messages, thinking=1), unknown)
    assert unknown.header == "thinking, messages[0].mood, messages[0].content[0].cache_control, " + (
        "messages[1].refusal"
    )
    assert unknown.counts == {"thinking": 1, "other": 1, "cache_control": 1, "refusal": 1}


def test_the_names_of_ignored_fields_are_bounded_and_fit_for_a_header() -> None:
    unknown = UnknownFields(strict=False)
    names = ["a,b\r\nset-cookie: x", "é\ud800", "", "x" * 1000, *(f"n{index}" for index in range(96))]
    parse_body(CompletionBody, {"prompt": "x", **dict.fromkeys(names, 1)}, unknown)
    first = ["a?b??set-cookie:?x", "??", "?", "x" * 64, *(f"n{index}" for index in range(16))]
    assert unknown.header == ", ".join([*first, "80 more"])
    assert unknown.counts == {"other": 100}


def test_all_sampling_fields_arrive() -> None:
    [session] = completion(
        body(
            max_tokens=9, temperature=0, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.5,
            presence_penalty=-1, frequency_penalty=1, logit_bias={"7": -100}, min_tokens=2, stop="END",
            stop_token_ids=[3], allowed_token_ids=[4, 7], ignore_eos=True, logprobs=0, seed=-1,
            speculation={"enabled": False, "max_draft_tokens": 4, "acceptance": "coupled"},
        )
    )  # fmt: skip
    assert session.sampling == SamplingParams(
        max_tokens=9, temperature=0, top_p=0.5, top_k=4, min_p=0.1, repetition_penalty=1.5,
        presence_penalty=-1, frequency_penalty=1, logit_bias=((7, -100.0),), min_tokens=2,
        stop_token_ids=(3,), allowed_token_ids=(4, 7), ignore_eos=True, logprobs=0, seed=2**64 - 1,
    )  # fmt: skip
    assert session.speculation == SpeculationParams(enabled=False, max_draft_tokens=4, acceptance="coupled")
    assert session.stops == ("END",)


@pytest.mark.parametrize(
    ("ids", "limit"),
    [([], "at least 1"), ([5, CODEC.vocab_size], f"vocabulary of {CODEC.vocab_size}"), ([5] * 4097, "at most 4096")],
)
def test_allowed_tokens_are_some_of_the_vocabulary(ids: list[int], limit: str) -> None:
    refused = refusal(body(allowed_token_ids=ids))
    assert refused.message.startswith("allowed_token_ids")
    assert limit in refused.message


@pytest.mark.parametrize(
    "fields",
    [{"bad_words": ["a"]}, {"min_tokens": 1, "stop_token_ids": [LETTER]}],
)
def test_a_request_that_leaves_no_token_to_choose_is_refused(fields: dict[str, Any]) -> None:
    refused = refusal(body(allowed_token_ids=[LETTER], **fields))
    assert refused.message.startswith("allowed_token_ids: leave no token to choose")
    assert refusal(body(allowed_token_ids=[1], min_tokens=1)).message == refused.message
    assert completion(body(allowed_token_ids=[LETTER, 5], **fields))


def test_a_bad_word_is_one_at_the_begin_of_a_text_and_after_a_space() -> None:
    def spelled(text: str) -> tuple[int, ...]:
        return CODEC.encode(text, field="", special_tokens=False, context_len=CONTEXT_LEN)

    [session] = completion(body(bad_words=["fox", " the"]))
    assert session.sampling.bad_words == tuple(map(spelled, ("fox", " fox", "the", " the")))


@pytest.mark.parametrize(
    ("words", "param", "limit"),
    [
        (["a"] * 65, "bad_words", "at most 64"),
        ([""], "bad_words[0]", "at least 1 character"),
        (["a" * 65], "bad_words[0]", "at most 64 characters"),
        ([7], "bad_words[0]", "valid string"),
    ],
)
def test_a_bad_word_that_cannot_be_one_is_refused(words: list[Any], param: str, limit: str) -> None:
    refused = refusal(body(bad_words=words))
    assert refused.param == param
    assert limit in refused.message


def test_top_k_minus_one_is_off_as_in_other_engines() -> None:
    assert completion(body(top_k=-1))[0].sampling.top_k == 0


OWN = replace(
    MODEL, defaults=ModelDefaults(sampling={"temperature": 0.6, "top_k": 20, "min_p": 0.1}, max_new_tokens=30)
)


def of_own(model: ServedModel, **fields: Any) -> SamplingParams:
    return chat(chat_body(seed=1, **fields), model=model)[0].sampling


def test_where_a_request_is_silent_the_models_own_defaults_hold() -> None:
    neutral = SamplingParams(max_tokens=30, temperature=0.6, top_k=20, min_p=0.1, seed=1)
    assert of_own(OWN) == of_own(OWN, temperature=None, top_k=None, max_tokens=None) == neutral


def test_what_a_request_says_wins_over_the_model_also_if_it_is_neutral() -> None:
    asked = of_own(OWN, temperature=0, top_k=-1, min_p=0, top_p=0.5, max_tokens=3)
    assert asked == SamplingParams(max_tokens=3, temperature=0, top_p=0.5, seed=1)


def test_a_completion_keeps_its_sixteen_tokens_whatever_the_model_says() -> None:
    [session] = completion(body(), model=OWN)
    assert (session.sampling.max_tokens, session.sampling.top_k) == (16, 20)


def test_a_chat_takes_the_whole_of_a_long_context() -> None:
    long = replace(MODEL, identity=replace(MODEL.identity, context_len=40_960))
    [session] = chat(chat_body(), model=long)
    assert session.sampling.max_tokens == 40_960 - len(session.prompt_token_ids)


def test_the_last_tokens_of_a_prompt_are_kept_where_it_is_asked_for() -> None:
    [whole], [cut] = completion(body()), completion(body(truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == whole.prompt_token_ids[-2:]
    assert completion(body(truncate_prompt_tokens=60))[0].prompt_token_ids == whole.prompt_token_ids
    [long] = completion(body(prompt=[*range(2, 102)], truncate_prompt_tokens=-1, max_tokens=10))
    assert long.prompt_token_ids == tuple(range(102 - (CONTEXT_LEN - 10), 102))


def test_a_text_or_chat_too_long_for_the_context_may_be_cut() -> None:
    text = "the fox " * CONTEXT_LEN
    [session] = completion(body(prompt=text, truncate_prompt_tokens=-1))
    assert len(session.prompt_token_ids) == CONTEXT_LEN - 1
    for spelled in ("", "<|end|>"):
        messages = [{"role": "user", "content": text + spelled}]
        [session] = chat(chat_body(messages=messages, truncate_prompt_tokens=9))
        assert session.prompt_token_ids[-4:] == chat(chat_body())[0].prompt_token_ids[-4:]
        assert len(session.prompt_token_ids) == 9


@pytest.mark.parametrize("asked", [0, -2, CONTEXT_LEN])
def test_a_truncation_that_keeps_nothing_or_leaves_no_room_is_refused(asked: int) -> None:
    refused = refusal(body(truncate_prompt_tokens=asked))
    assert (
        refused.message
        == f"truncate_prompt_tokens: must be -1, or from 1 to 63, one less than the context, got {asked}"
    )


def test_a_prompt_may_be_text_or_tokens_one_or_several() -> None:
    text = CODEC.encode("the fox", field="prompt", special_tokens=True, context_len=64)
    assert text[0] == 0
    assert [s.prompt_token_ids for s in completion(body())] == [text]
    assert completion(body(prompt=["the fox", "a"]))[0].prompt_token_ids == text
    assert [s.prompt_token_ids for s in completion(body(prompt=[5, 6]))] == [(5, 6)]
    assert [s.prompt_token_ids for s in completion(body(prompt=[[5, 6], [7]]))] == [(5, 6), (7,)]


def test_samples_of_a_prompt_have_their_own_seeds_and_the_first_one_the_seed_of_the_request() -> None:
    sessions = completion(body(prompt=["a", "b"], n=3, seed=42))
    seeds = [session.sampling.seed for session in sessions]
    assert seeds == [42, sample_seed(42, 1), sample_seed(42, 2)] * 2
    assert len(set(seeds)) == 3
    assert len({session.session_id for session in sessions}) == 6


def test_a_request_without_a_seed_gets_a_new_one_each_time() -> None:
    assert completion(body())[0].sampling.seed != completion(body())[0].sampling.seed


def test_a_completion_that_names_no_max_tokens_gets_sixteen_or_what_the_context_leaves() -> None:
    assert completion(body())[0].sampling.max_tokens == 16
    assert completion(body(prompt=[7] * 60))[0].sampling.max_tokens == 4


def test_a_chat_that_names_no_max_tokens_gets_the_rest_of_the_context() -> None:
    [session] = chat(chat_body())
    assert session.sampling.max_tokens == CONTEXT_LEN - len(session.prompt_token_ids)


def test_max_completion_tokens_wins_over_its_older_name() -> None:
    assert chat(chat_body(max_tokens=3, max_completion_tokens=5))[0].sampling.max_tokens == 5


def test_a_chat_is_rendered_with_one_begin_token_and_an_opening_for_the_answer() -> None:
    [session] = chat(chat_body())
    expected = "<|begin|><|user|>the fox<|end|><|assistant|>"
    assert b"".join(CODEC.token_bytes(t) for t in session.prompt_token_ids).decode() == expected


def test_text_parts_of_a_message_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [session] = chat(chat_body(messages=[{"role": "user", "content": parts}]))
    assert b"a\nb" in b"".join(CODEC.token_bytes(t) for t in session.prompt_token_ids)


def test_chat_logprobs_count_alternatives_in_their_own_field() -> None:
    assert chat(chat_body())[0].sampling.logprobs is None
    assert chat(chat_body(logprobs=True))[0].sampling.logprobs == 0
    assert chat(chat_body(logprobs=True, top_logprobs=3))[0].sampling.logprobs == 3


def test_a_long_body_of_many_parts_is_refused_and_one_of_many_numbers_is_read() -> None:
    numbers = '{"prompt": [' + "1, " * 100_000 + "2.0]}"
    assert parse_json_object(numbers.encode())["prompt"][-1] == 2
    for parts in (
        '{"prompt": [' + "[], " * 100_000 + "1]}",
        "{" + ", ".join(f'"{n}": 1' for n in range(100_000)) + "}",
    ):
        with pytest.raises(InvalidRequestError, match="more than 100000 lists, objects and members"):
            parse_json_object(parts.encode())


@pytest.mark.parametrize("padding", ["", " " * 200_000])
@pytest.mark.parametrize(
    "text", ['{"a": [1, {"b": "\\u00e9"}, -2.5e3, true, null]}', '{"a" 1}', '{"a": 01}', "[1", '{"a": "\x01"}']
)
def test_a_long_body_is_read_as_a_short_one_is(padding: str, text: str) -> None:
    def outcome(body: str) -> object:
        try:
            return parse_json_object(body.encode())
        except InvalidRequestError as error:
            return error.problem.partition(" at line")[0]

    assert outcome(padding + text) == outcome(text)


def test_a_prompt_alone_asks_for_one_token_that_nobody_sees() -> None:
    [session] = completion(body(echo=True, max_tokens=0, logprobs=2))
    assert (session.echo, session.prompt_only, session.sampling.max_tokens) == ("the fox", True, 1)
    assert (session.sampling.logprobs, session.sampling.prompt_logprobs) == (2, 2)
    assert not session.resumable
    [read] = completion(body(max_tokens=0, prompt_logprobs=3))
    assert (read.echo, read.prompt_only, read.sampling.logprobs, read.sampling.prompt_logprobs) == (None, True, None, 3)


def test_each_sample_of_each_prompt_begins_with_its_own_prompt() -> None:
    sessions = completion(body(prompt=["the fox", "a dog"], n=2, echo=True))
    assert [session.echo for session in sessions] == ["the fox", "the fox", "a dog", "a dog"]
    [of_tokens] = completion(body(prompt=list(sessions[0].prompt_token_ids), echo=True))
    assert of_tokens.echo == "the fox"
    [cut] = completion(body(prompt="the fox", echo=True, truncate_prompt_tokens=1))
    assert "the fox".endswith(str(cut.echo))
    assert cut.echo != "the fox"


def text_of(session: SessionRequest) -> str:
    return CODEC.decode(session.prompt_token_ids, special_tokens=True)


def test_a_last_message_that_is_gone_on_with_ends_the_prompt() -> None:
    messages = [*USER, {"role": "assistant", "content": "the fox"}]
    [ended] = chat(chat_body(messages=messages))
    [continued] = chat(chat_body(messages=messages, continue_final_message=True))
    [closed] = chat(chat_body(messages=messages, add_generation_prompt=False))
    assert text_of(continued).endswith("the fox")
    assert text_of(ended).startswith(text_of(closed))
    assert text_of(closed).startswith(text_of(continued))
    assert len({text_of(each) for each in (ended, continued, closed)}) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
    ],
)
def test_what_is_wrong_with_a_prompt_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat_body(**fields), of_chat=True).param == param


def test_a_template_of_the_request_is_used_where_that_is_allowed() -> None:
    trusting = replace(MODEL, trusts_templates=True)
    [session] = chat(chat_body(chat_template="{{ messages[0].content }} and no more"), model=trusting)
    assert text_of(session).endswith(" and no more")
    for template, problem in (("{% for %}", "cannot be compiled"), ("x" * 100_001, "at most 100000")):
        with pytest.raises(InvalidRequestError, match=problem) as caught:
            chat(chat_body(chat_template=template), model=trusting)
        assert to_http(caught.value).param == "chat_template"


def test_more_likelihoods_of_prompts_than_are_told_at_once_are_refused() -> None:
    roomy = replace(MODEL, identity=replace(MODEL.identity, context_len=1000))
    prompts = [[LETTER] * 300] * 128
    assert len(completion(body(prompt=prompts, prompt_logprobs=2), model=roomy)) == 128
    with pytest.raises(InvalidRequestError, match="asks for 806400 log probabilities") as caught:
        completion(body(prompt=prompts, prompt_logprobs=20), model=roomy)
    assert to_http(caught.value).param == "prompt_logprobs"
