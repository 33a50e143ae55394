"""The official client, at both doors: text, streams, likelihoods, token ids, and chats that are gone on with."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

PROMPT = "Once upon a time there was a small"
USER: Any = {"role": "user", "content": "Tell me a story."}


@pytest.fixture
def client(served) -> OpenAI:
    return OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120)


def test_a_stream_joins_to_the_whole(client, served) -> None:
    asked: Any = {"model": served.model, "prompt": PROMPT, "max_tokens": 30, "seed": 3}
    whole = client.completions.create(**asked)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole.choices[0].text
    assert whole.usage.completion_tokens == 30


def test_a_message_goes_back_in_as_it_came(client, served) -> None:
    asked: Any = {"model": served.model, "max_tokens": 12, "seed": 1}
    first = client.chat.completions.create(messages=[USER], **asked)
    answered: Any = first.choices[0].message.model_dump()
    again = client.chat.completions.create(messages=[USER, answered, USER], **asked)
    assert again.choices[0].message.content


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_likelihood_of_a_prompt_is_the_same_with_and_without_speculation(client, served, max_tokens) -> None:
    asked: Any = {"model": served.model, "prompt": PROMPT, "echo": True, "max_tokens": max_tokens, "logprobs": 1}
    answers = [
        client.completions.create(**asked, temperature=0, extra_body={"speculation": {"enabled": enabled}})
        for enabled in (True, False)
    ]
    first, second = (answer.choices[0] for answer in answers)
    assert first.logprobs == second.logprobs
    assert first.text.startswith(PROMPT)
    assert first.logprobs.token_logprobs[0] is None
    assert len(first.logprobs.tokens) == answers[0].usage.prompt_tokens + max_tokens
    assert answers[0].usage.completion_tokens == max_tokens
    assert all(value <= 0 for value in first.logprobs.token_logprobs[1:])


def test_the_tokens_of_a_prompt_bring_its_own_likelihood_again(client, served) -> None:
    asked: Any = {"model": served.model, "echo": True, "max_tokens": 0, "logprobs": 0}
    text = client.completions.create(prompt=PROMPT, extra_body={"return_token_ids": True}, **asked).choices[0]
    tokens = client.completions.create(prompt=text.prompt_token_ids, **asked).choices[0]
    assert tokens.logprobs.token_logprobs == text.logprobs.token_logprobs
    assert math.isfinite(sum(tokens.logprobs.token_logprobs[1:]))


def test_what_was_generated_is_as_likely_when_it_is_read_as_when_it_was_written(client, served) -> None:
    written = client.completions.create(
        model=served.model, prompt=PROMPT, max_tokens=20, logprobs=0, seed=5, extra_body={"return_token_ids": True}
    ).choices[0]
    read = client.completions.create(
        model=served.model, prompt=written.prompt_token_ids + written.token_ids, echo=True, max_tokens=0, logprobs=0
    ).choices[0]
    assert read.logprobs.token_logprobs[-20:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-3)


def test_the_last_message_is_gone_on_with(client, served) -> None:
    begun: Any = {"role": "assistant", "content": "The old house"}
    asked: Any = {"model": served.model, "messages": [USER, begun], "max_tokens": 4}
    answer = client.chat.completions.create(
        **asked, extra_body={"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    )
    plain = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    ended = plain.prompt_token_ids
    assert ended[: len(answer.prompt_token_ids) - 1] == answer.prompt_token_ids[:-1]
    assert len(ended) > len(answer.prompt_token_ids)


def test_pictures_and_sounds_are_refused_by_the_name_of_their_field(client, served) -> None:
    parts: Any = {
        "image_url": {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        "input_audio": {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    }
    for name, part in parts.items():
        message: Any = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}
        with pytest.raises(BadRequestError) as refused:
            client.chat.completions.create(model=served.model, messages=[message])
        assert refused.value.param == f"messages[0].content[1].{name}"
