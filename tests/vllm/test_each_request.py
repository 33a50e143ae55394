"""Each request decides: how many guesses it gets beside others, and which sampling fields it is served with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.vllm.client import Tokens, ask, client, until_drafted

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def carried(name: str, value: object) -> dict[str, Any]:
    """A field by which a request of `vllm serve` decides."""
    return {"vllm_xargs": {f"speculation.{name}": value}}


NUM_TOKENS = 96
STREAMS, LIMIT = 8, 2
OFF = carried("enabled", False)
LIMITED = carried("max_draft_tokens", LIMIT)
SAMPLED = {"temperature": 0.8, "seed": 7}
LEAST_DRAFTED = NUM_TOKENS // 4
# A token of nearly every text.
COMMON = "225"
# Fields of a request that is then served without guesses, by the table in docs/vllm.md.
UNGUESSED: dict[str, dict[str, Any]] = {
    "off": SAMPLED | OFF,
    "min_p": SAMPLED | {"min_p": 0.2},
    "logit_bias": {"logit_bias": {COMMON: -100.0}},
    "logit_bias and min_p": SAMPLED | {"min_p": 0.2, "logit_bias": {COMMON: -100.0}},
}
# Fields that vLLM applies to guesses, too; greedy, so that each has one right text.
GUESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.4},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "allowed_token_ids": {"allowed_token_ids": [*range(1000)]},
    "bad_words": {"bad_words": ["self", "return"]},
    "min_tokens": {"min_tokens": NUM_TOKENS // 2, "ignore_eos": False},
    "logprobs": {"logprobs": 2},
}


async def answer(url: str, prompt: Sequence[int], **settings: Any) -> tuple[Tokens, dict[str, Any]]:
    """Token ids of a completion, and what its answer says of speculation."""
    async with client() as http:
        found = await http.post(f"{url}/v1/completions", json=ask(prompt, NUM_TOKENS, **settings))
    assert found.status_code == httpx.codes.OK, found.text
    body = found.json()
    return body["choices"][0]["token_ids"], (body.get("metrics") or {}).get("speculative_decoding") or {}


async def answers(
    url: str, prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]]
) -> list[tuple[Tokens, dict[str, Any]]]:
    """The same of several requests at once."""
    return await asyncio.gather(*(answer(url, prompt, **each) for prompt, each in zip(prompts, settings, strict=True)))


async def test_of_eight_streams_each_gets_as_many_guesses_as_it_asks_for(steady, plain, prompts) -> None:
    asked = [OFF, LIMITED, OFF, {}] * (STREAMS // 4)
    # Those of plain vLLM say the same, which means nothing there.
    expected = await answers(plain.url, prompts[:STREAMS], asked)
    await until_drafted(steady.url, prompts[-1])
    found = await answers(steady.url, prompts[:STREAMS], asked)
    assert [text for text, _ in found] == [text for text, _ in expected]
    for settings, (_, said) in zip(asked, found, strict=True):
        drafted, accepted = said["num_draft_tokens"], said["num_accepted_draft_tokens"]
        if settings is OFF:
            assert (drafted, accepted, said["num_spec_steps"]) == (0, 0, 0)
        else:
            assert 0 < accepted <= drafted
            assert drafted > LEAST_DRAFTED
            assert (max(said["per_step_drafted"]) > LIMIT) is (settings is not LIMITED)


@pytest.mark.parametrize("field", UNGUESSED)
async def test_what_vllm_cannot_apply_to_guesses_is_served_without_any(steady, plain, prompts, field: str) -> None:
    asked = [UNGUESSED[field], {}] * 2
    expected = await answers(plain.url, prompts[:4], asked)
    await until_drafted(steady.url, prompts[-1])
    found = await answers(steady.url, prompts[:4], asked)
    # At 0.8, too: the noise of a request depends on its seed and on its own steps.
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [said["num_draft_tokens"] > 0 for _, said in found] == [False, True] * 2
    assert (await answer(plain.url, prompts[0]))[0] != found[0][0]


@pytest.mark.parametrize("field", GUESSED)
async def test_what_vllm_applies_to_guesses_is_served_with_them(steady, plain, prompts, field: str) -> None:
    asked = [GUESSED[field]] * 2
    expected = await answers(plain.url, prompts[:2], asked)
    await until_drafted(steady.url, prompts[-1])
    found = await answers(steady.url, prompts[:2], asked)
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert all(said["num_draft_tokens"] > 0 for _, said in found)


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("speculation.enabled", carried("enabled", "no"), "must be true or false, got 'no'"),
        ("speculation.gamma", carried("gamma", 3), "is not known under vLLM"),
        ("speculation.max_draft_tokens", carried("max_draft_tokens", 1000), "must be a number from 0 to 64, got 1000"),
        # Beside another request's `logprobs` it would end the engine.
        ("logprob_token_ids", {"logprobs": 1, "logprob_token_ids": [5, 6]}, "is not served beside speculation"),
    ],
)
async def test_a_wrong_wish_is_refused_by_name(steady, prompts, name: str, asked: dict[str, Any], said: str) -> None:
    async with client() as http:
        refused = await http.post(f"{steady.url}/v1/completions", json=ask(prompts[0], 4, **asked))
    assert refused.status_code == httpx.codes.BAD_REQUEST
    error = refused.json()["error"]
    assert f"{name}: {said}" in error["message"]
    assert error["param"] == name
