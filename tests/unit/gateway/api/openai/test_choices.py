"""Good requests become the right sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.api.openai.choices import sample_seed
from paceline.gateway.fleet.generation_config import ModelDefaults
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.body import parse_json_object
from paceline.gateway.http.errors import to_http
from paceline.gateway.sessions.request import MAX_LOGPROBS, SessionRequest
from tests.support.openai_bodies import (
    CODEC,
    CONTEXT_LEN,
    LETTER,
    MODEL,
    USER,
    body,
    chat,
    chat_body,
    completion,
    refusal,
)


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


@pytest.mark.parametrize(("given", "alternatives"), [(False, None), (True, 1), ("true", 1), (0, 0), (3, 3)])
def test_log_probabilities_of_a_completion_may_be_asked_for_as_those_of_a_chat(
    given: Any, alternatives: int | None
) -> None:
    assert completion(body(logprobs=given))[0].sampling.logprobs == alternatives


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


def test_log_probabilities_are_bounded_over_all_choices_before_any_work() -> None:
    """The third audit: `n` of 128 held gigabytes of them, and wrote them at once."""
    wide = ServedModel(identity=replace(MODEL.identity, context_len=10**6), codec=CODEC)
    asked = {"n": 10, "logprobs": True, "top_logprobs": 4}
    [session, *_] = chat(chat_body(**asked), model=wide)
    assert session.sampling.max_tokens == MAX_LOGPROBS // 50
    for raw, read in (
        (chat_body(**asked, max_tokens=10_001), chat),
        (body(n=10, logprobs=4, max_tokens=10_001), completion),
    ):
        with pytest.raises(InvalidRequestError, match="asks for 500050 log probabilities, at most 500000") as refused:
            read(raw, model=wide)
        assert refused.value.field == "logprobs"
    # A stream holds none of them.
    [session, *_] = chat(chat_body(**asked, max_tokens=10_001, stream=True), model=wide)
    assert session.sampling.max_tokens == 10_001
