"""What a verifier refuses, however idle it is; each refusal names the field and the limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import COUPLED, DRAFT_MODEL, NGRAM, REJECTION, SamplingParams, SpeculationParams
from paceline.verifier.served import ServedEngine, TargetStepper

EOS, STOP = 7, 8
IDENTITY = ModelIdentity(
    name="m", vocab_hash="v", vocab_size=64, context_len=100, eos_token_ids=(EOS,), methods=(NGRAM,)
)
SAMPLING = SamplingParams(max_tokens=10, stop_token_ids=(STOP,))
FINE = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1, 2, 3),
    committed_token_ids=(4, 5),
    sampling=SAMPLING,
    speculation=SpeculationParams(),
)


def never_made() -> TargetStepper:
    raise AssertionError("no engine is needed")


def check(request: GenerateRequest, *methods: str, default_rule: str = COUPLED) -> None:
    identity = replace(IDENTITY, methods=methods or IDENTITY.methods)
    ServedEngine(identity=identity, default_rule=default_rule, max_num_seqs=1, make=never_made).check(request)


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
        ({"speculation": SpeculationParams(predicted_token_ids=(1, 64))}, "predicted_token_ids.*64"),
        ({"prompt_token_ids": (1,) * 91, "committed_token_ids": ()}, "91 prompt tokens.*context of 100"),
        ({"speculation": SpeculationParams(method="medusa")}, "speculation.method.*medusa is not served"),
    ],
)
def test_what_it_cannot_serve_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check(replace(FINE, **changes))


@pytest.mark.parametrize(
    ("methods", "asked", "default_rule"),
    [
        ((NGRAM,), SpeculationParams(acceptance=REJECTION), COUPLED),
        ((DRAFT_MODEL, NGRAM), SpeculationParams(method=NGRAM), REJECTION),
    ],
)
def test_a_rule_for_chains_needs_a_method_that_draws_them(
    methods: tuple[str, ...], asked: SpeculationParams, default_rule: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check(replace(FINE, speculation=asked), *methods, default_rule=default_rule)
    wanted = "speculation.acceptance: rejection needs the method draft_model or eagle3, and here it is ngram"
    assert str(refused.value) == wanted
