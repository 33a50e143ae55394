"""Requests as vLLM sees them: the same, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest
from paceline.core.params import DRAFT_MODEL, MAX_DRAFT_TOKENS, REJECTION, SamplingParams, SpeculationParams
from paceline.verifier.vllm.sampling import check_under_vllm, counted_anew, seed_after, vllm_sampling
from paceline.vllm.settings import speculation_of

EOS = (7, 9)
SAMPLING = SamplingParams(
    max_tokens=10,
    temperature=0.8,
    top_p=0.9,
    top_k=40,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=-0.4,
    min_tokens=4,
    stop_token_ids=(8,),
    allowed_token_ids=(1, 2, 7),
    bad_words=((5,), (5, 6, 1)),
    logprobs=3,
    seed=2**64 - 1,
)


def request(
    committed: tuple[int, ...] = (), speculation: SpeculationParams | None = None, **changes: Any
) -> GenerateRequest:
    return GenerateRequest(
        session_id="s",
        epoch=0,
        prompt_token_ids=(1, 2),
        committed_token_ids=committed,
        sampling=replace(SAMPLING, **changes),
        speculation=speculation or SpeculationParams(),
    )


def test_every_field_of_a_request_reaches_vllm() -> None:
    assert vllm_sampling(request(min_p=0.1, logit_bias=((3, -2.0),)), EOS) == {
        "max_tokens": 10,
        "min_tokens": 4,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "logit_bias": {3: -2.0},
        "allowed_token_ids": [1, 2, 7],
        "_bad_words_token_ids": [[5], [5, 6, 1]],
        "ignore_eos": True,
        "stop_token_ids": [7, 8, 9],
        "_all_stop_token_ids": {7, 8, 9},
        "logprobs": 3,
        "detokenize": False,
        "extra_args": None,
    }


def test_a_text_that_ignores_end_tokens_is_not_ended_by_them_and_has_none_before_its_least_length() -> None:
    fields = vllm_sampling(request(ignore_eos=True), EOS)
    assert fields["stop_token_ids"] == [8]
    assert fields["_all_stop_token_ids"] == {7, 8, 9}


def test_a_session_that_moved_here_generates_what_is_left_of_it() -> None:
    fields = vllm_sampling(request(committed=(3, 3, 3)), EOS)
    assert (fields["max_tokens"], fields["min_tokens"]) == (7, 1)
    assert vllm_sampling(request(committed=(3,) * 6), EOS)["min_tokens"] == 0


def test_the_noise_of_a_session_does_not_come_again_where_it_goes_on() -> None:
    seeds = {seed_after(seed, num_committed) for seed in (0, 1) for num_committed in range(50)}
    assert len(seeds) == 100
    assert seed_after(5, 0) == 5


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_a_greedy_session_has_no_generator(temperature: float) -> None:
    fields = vllm_sampling(request(temperature=temperature), EOS)
    assert (fields["temperature"], fields["seed"]) == (0.0, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.005}, "temperature: must be 0, or from 0.01 to 2"),
        ({"temperature": 2.5}, "temperature: must be 0, or from 0.01 to 2"),
    ],
)
def test_what_vllm_would_compute_otherwise_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_under_vllm(request(**changes))


def test_a_rule_that_promises_something_else_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"speculation\.acceptance: coupled is not served under vLLM"):
        check_under_vllm(request(speculation=SpeculationParams(acceptance="coupled")))
    check_under_vllm(request(speculation=SpeculationParams(acceptance="rejection")))


@pytest.mark.parametrize(
    ("speculation", "most"),
    [
        (SpeculationParams(enabled=False), 0),
        (SpeculationParams(enabled=False, max_draft_tokens=3), 0),
        (SpeculationParams(max_draft_tokens=3), 3),
        (SpeculationParams(method=DRAFT_MODEL, acceptance=REJECTION), MAX_DRAFT_TOKENS),
    ],
)
def test_what_a_request_says_of_speculation_goes_along_with_it(speculation: SpeculationParams, most: int) -> None:
    check_under_vllm(request(speculation=speculation))
    carried = vllm_sampling(request(speculation=speculation), EOS)["extra_args"]
    assert speculation_of(carried).cap == most


PLAIN = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "bad_words": ()}


@pytest.mark.parametrize(
    ("committed", "changes", "anew"),
    [
        ((), {}, False),
        ((3,), {}, True),
        ((3,), PLAIN, False),
        ((3,), PLAIN | {"frequency_penalty": 0.1}, True),
        ((3,), PLAIN | {"bad_words": ((3,),)}, False),
        ((4, 3), PLAIN | {"bad_words": ((4, 3, 2),)}, True),
        ((4, 3), PLAIN | {"bad_words": ((3, 2),)}, True),
        ((4, 3), PLAIN | {"bad_words": ((4, 2),)}, False),
    ],
)
def test_a_text_says_so_where_vllm_forgets_what_counts(
    committed: tuple[int, ...], changes: dict[str, Any], anew: bool
) -> None:
    assert counted_anew(request(committed=committed, **changes)) is anew
