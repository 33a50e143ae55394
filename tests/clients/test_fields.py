"""What clients ask for besides: fields of vLLM and others with the official client, and the small doors."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

IGNORED = "x-paceline-ignored-fields"
USER: Any = {"role": "user", "content": "Tell me a story."}
PROMPT = "Once upon a time there was a small"


@pytest.fixture
def client(served) -> OpenAI:
    return OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def chat(client, served):
    """Asks for a chat; `fields` are those that the client does not know."""

    def ask(messages: Any = (USER,), max_tokens: Any = 8, **fields: Any) -> Any:
        asked: Any = {"model": served.model, "messages": [*messages], "seed": 1}
        if max_tokens is not None:
            asked["max_tokens"] = max_tokens
        return client.chat.completions.with_raw_response.create(**asked, extra_body=fields)

    return ask


@pytest.fixture
def text(client, served):
    """Completes a text, greedily."""

    def ask(prompt: Any = PROMPT, **fields: Any) -> Any:
        asked: Any = {"model": served.model, "prompt": prompt, "max_tokens": 12, "temperature": 0}
        fields = {"return_token_ids": True, **fields}
        return client.completions.create(**asked, extra_body=fields).choices[0]

    return ask


def test_unknown_fields_are_ignored_and_named(chat) -> None:
    answer = chat([{**USER, "mood": "good"}], colour="red")
    assert {*answer.headers[IGNORED].split(", ")} == {"colour", "messages[0].mood"}
    assert IGNORED not in chat().headers


def test_nulls_are_as_good_as_absent_at_every_depth(chat) -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "name"))
    answer = chat([{**USER, **nulls}], stop=None, tools=None, response_format=None, logit_bias=None, user=None)
    assert answer.parse().choices[0].message == chat().parse().choices[0].message
    assert IGNORED not in answer.headers


def test_a_developer_s_message_is_read_as_the_system_s(chat) -> None:
    told = [
        chat([{"role": role, "content": "Be brief."}, USER], return_token_ids=True).parse().prompt_token_ids
        for role in ("developer", "system")
    ]
    assert told[0] == told[1]


def test_the_model_s_own_sampling_holds_where_a_request_is_silent(caller) -> None:
    client = OpenAI(base_url=caller.v1, api_key="none", max_retries=0, timeout=120)
    silent = client.responses.create(model=caller.model, input="Hello")
    assert (silent.temperature, silent.top_p) == (0.625, 0.75)
    asked = client.responses.create(model=caller.model, input="Hello", temperature=0.5)
    assert (asked.temperature, asked.top_p) == (0.5, 0.75)


def test_a_prompt_is_judged_in_vllm_s_form(text) -> None:
    told = text(prompt_logprobs=1)
    assert told.prompt_logprobs[0] is None
    for token_id, judged in zip(told.prompt_token_ids[1:], told.prompt_logprobs[1:], strict=True):
        assert judged[str(token_id)]["logprob"] <= 0


def test_a_stop_string_is_shown_or_not(text) -> None:
    stop = text().text[4:7]
    hidden, shown = (text(stop=[stop], include_stop_str_in_output=show).text for show in (False, True))
    assert shown == hidden + stop


def test_special_tokens_are_shown_or_not(text, served) -> None:
    end = {"allowed_token_ids": [1], "ignore_eos": True}
    assert text(**end).text == ""
    assert text(**end, skip_special_tokens=False).text.startswith("<|end|>")


def test_a_prompt_is_truncated_at_its_front(text) -> None:
    whole = text().prompt_token_ids
    assert text(truncate_prompt_tokens=4).prompt_token_ids == whole[-4:]


def test_tokens_are_allowed_and_words_are_not(text) -> None:
    plain = text()
    assert {*text(allowed_token_ids=plain.token_ids[:2], ignore_eos=True).token_ids} <= {*plain.token_ids[:2]}
    word = plain.text.split()[0]
    assert word not in text(bad_words=[word, f" {word}"]).text.split()


def test_a_template_comes_with_a_request(chat) -> None:
    own = "{% for message in messages %}{{ message.content }}{% endfor %}"
    answer = chat(chat_template=own, return_token_ids=True).parse()
    assert len(answer.prompt_token_ids) < len(chat(return_token_ids=True).parse().prompt_token_ids)


@pytest.mark.parametrize("fields", [{"priority": 5}, {"cache_salt": "mine"}, {"min_tokens": 3}])
def test_what_changes_no_token_changes_none(text, fields) -> None:
    assert text(**fields).token_ids == text().token_ids


def test_an_unbounded_chat_runs_to_the_end_of_the_context(chat) -> None:
    long = {"role": "user", "content": "a story " * 660}
    answer = chat([long], max_tokens=None, ignore_eos=True).parse()
    assert answer.usage.total_tokens == 2048
    assert answer.choices[0].finish_reason == "length"


def test_what_would_change_the_answer_and_is_not_served_is_refused_by_name(chat) -> None:
    for name, value in (("use_beam_search", True), ("functions", [{"name": "f"}]), ("modalities", ["audio"])):
        with pytest.raises(BadRequestError) as refused:
            chat(**{name: value})
        assert refused.value.param == name


@pytest.fixture
def http(served):
    with httpx.Client(base_url=served.url, timeout=60, trust_env=False) as client:
        yield client


def test_tokens_become_the_text_that_they_were(http, served) -> None:
    told = http.post("/tokenize", json={"model": served.model, "prompt": PROMPT, "add_special_tokens": False}).json()
    back = http.post("/detokenize", json={"model": served.model, "tokens": told["tokens"]}).json()
    assert (told["count"], back["prompt"]) == (len(told["tokens"]), PROMPT)


@pytest.mark.parametrize("path", ["/version", "/ping", "/load", "/health", "/livez", "/readyz", "/v1/models"])
def test_small_doors_are_open(http, path) -> None:
    assert http.get(path).status_code == 200


def test_models_are_listed_to_either_official_client(client, served) -> None:
    others = Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=60)
    assert [each.id for each in client.models.list()] == [served.model]
    assert [each.id for each in others.models.list()] == [served.model]
    assert client.models.retrieve(served.model).max_model_len == 2048


def test_pages_of_allowed_origins_may_ask(http) -> None:
    asks = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        allowed = http.options(path, headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert (
            "access-control-allow-origin"
            not in http.options(path, headers={**asks, "origin": "https://other.com"}).headers
        )


def test_a_request_keeps_its_name(client, served) -> None:
    asked: Any = {"model": served.model, "prompt": PROMPT, "max_tokens": 1}
    answer = client.completions.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert answer.parse()._request_id == "mine"


def test_metrics_tell_the_model_under_vllm_s_label(client, http, served) -> None:
    client.completions.create(model=served.model, prompt=PROMPT, max_tokens=2)
    page = http.get("/metrics").text
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
    for name in names:
        assert any(line.startswith(name) and f'model_name="{served.model}"' in line for line in page.splitlines()), name
