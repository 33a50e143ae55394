"""Instructor: objects of a class, by tools and by schema, over OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel, ConfigDict, Field

USER = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """How the weather is."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "cloudy"]
    degrees: int = Field(ge=0, le=99)


def client_of(served, mode: Mode) -> Any:
    if mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON):
        plain: Any = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120)
        return instructor.from_anthropic(plain, mode=mode)
    return instructor.from_openai(
        openai.OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120), mode=mode
    )


@pytest.mark.parametrize(
    "mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.ANTHROPIC_TOOLS, Mode.RESPONSES_TOOLS]
)
def test_an_answer_is_an_object_of_its_class(served, mode) -> None:
    client = client_of(served, mode)
    told = client.create(model=served.model, messages=USER, response_model=Weather, max_tokens=80, max_retries=1)
    assert isinstance(told, Weather)


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA])
def test_an_object_grows_while_it_is_streamed(served, mode) -> None:
    client = client_of(served, mode)
    grown = [*client.create_partial(model=served.model, messages=USER, response_model=Weather, max_tokens=80)]
    assert len(grown) > 1
    Weather.model_validate(grown[-1].model_dump())
