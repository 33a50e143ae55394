"""What a verifier refuses, however idle it is; each refusal names the field and the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.acceptance_rules import Rules
from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.verifier.checks import MAX_SALT_CHARS, check_request

EOS, STOP = 7, 8
IDENTITY = ModelIdentity(name="m", vocab_hash="v", vocab_size=64, context_len=100, eos_token_ids=(EOS,))
SAMPLING = SamplingParams(max_tokens=10, stop_token_ids=(STOP,))
FINE = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1, 2, 3),
    committed_token_ids=(4, 5),
    sampling=SAMPLING,
    speculation=SpeculationParams(),
)


def check(request: GenerateRequest) -> None:
    check_request(request, IDENTITY, max_model_len=100, methods=("ngram",), rules=Rules())


def test_what_can_be_served_passes() -> None:
    check(FINE)
    check(replace(FINE, committed_token_ids=(4, EOS), sampling=replace(SAMPLING, ignore_eos=True)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"committed_token_ids": (4, EOS)}, "committed_token_ids.*ends the text"),
        ({"committed_token_ids": (STOP, 4)}, "committed_token_ids.*ends the text"),
        ({"committed_token_ids": (4,) * 10}, "committed_token_ids.*fewer than max_tokens"),
        ({"committed_token_ids": (64,)}, "committed_token_ids.*64"),
        ({"prompt_token_ids": (1, 64)}, "prompt_token_ids.*64"),
        ({"prompt_token_ids": (1,) * 91, "committed_token_ids": ()}, "91 prompt tokens.*context of 100"),
        ({"cache_salt": "x" * (MAX_SALT_CHARS + 1)}, f"cache_salt.*{MAX_SALT_CHARS}"),
        ({"speculation": SpeculationParams(method="medusa")}, "speculation.method.*medusa is not served"),
        ({"speculation": SpeculationParams(acceptance="rejection")}, "speculation.acceptance.*rejection needs"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(replace(FINE, **changes))
