"""Frameworks over the official client's protocol: LangChain and LiteLLM, whole answers and streams."""

from __future__ import annotations

import litellm
import pytest
from langchain_openai import ChatOpenAI, OpenAI

USER = [{"role": "user", "content": "Tell me a story."}]


@pytest.mark.parametrize("kind", [ChatOpenAI, OpenAI])
def test_langchain_streams_what_it_gets_as_a_whole(served, kind) -> None:
    model = kind(base_url=served.v1, api_key="none", model=served.model, max_tokens=16, seed=7, max_retries=0)
    text = [getattr(each, "content", each) for each in (model.invoke("Hello"), *model.stream("Hello"))]
    assert text[0]
    assert "".join(text[1:]) == text[0]


def test_langchain_counts_tokens_and_reads_log_probabilities(served) -> None:
    model = ChatOpenAI(
        base_url=served.v1, api_key="none", model=served.model, max_tokens=5, logprobs=True, top_logprobs=2
    )
    answer = model.invoke("Hello")
    assert answer.usage_metadata["output_tokens"] == 5
    assert len(answer.response_metadata["logprobs"]["content"]) == 5


def test_litellm_streams_what_it_gets_as_a_whole(served) -> None:
    asked = {
        "model": f"openai/{served.model}", "api_base": served.v1, "api_key": "none", "messages": USER,
        "max_tokens": 16, "seed": 7, "num_retries": 0,
    }  # fmt: skip
    whole = litellm.completion(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert whole
    assert "".join(pieces) == whole
