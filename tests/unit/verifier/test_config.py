"""What `--speculative-config` may say, and what a verifier then refuses."""

from __future__ import annotations

import pytest

from paceline.core.acceptance_rules import Rules
from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import BLOCK, COUPLED, DRAFT_MODEL, NGRAM, REJECTION, SamplingParams, SpeculationParams
from paceline.verifier.checks import check_request
from paceline.verifier.config import speculation_from


def test_the_coupled_rule_is_the_default_and_no_lossy_one_is_served() -> None:
    assert speculation_from("{}").rules == Rules(default=COUPLED, more=())


def test_a_deployment_may_have_another_default() -> None:
    assert speculation_from('{"acceptance": "block"}').rules.default == BLOCK


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"acceptance": "lucky"}', "'lucky' is not known here; there are coupled, rejection, block"),
        ('{"lossy": "yes"}', "lossy must be true or false, got 'yes'"),
        (
            '{"acceptance": "block", "method": "ngram"}',
            "acceptance block needs the method draft_model or eagle3, got ngram",
        ),
    ],
)
def test_what_cannot_be_served_stops_the_start(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        speculation_from(given)


def refusal(speculation: SpeculationParams, rules: Rules, methods: tuple[str, ...] = (DRAFT_MODEL, NGRAM)) -> str:
    request = GenerateRequest(
        session_id="s",
        epoch=1,
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=4),
        speculation=speculation,
    )
    identity = ModelIdentity(name="toy", vocab_hash="toy", vocab_size=8, context_len=64)
    with pytest.raises(InvalidRequestError) as refused:
        check_request(request, identity, max_model_len=64, methods=methods, rules=rules)
    return str(refused.value)


def test_a_rule_that_is_not_served_is_refused_by_name() -> None:
    message = refusal(SpeculationParams(acceptance="typical"), Rules())
    assert message == "speculation.acceptance: typical is not served here, only coupled, rejection, block"


def test_a_rule_for_chains_is_refused_without_the_method_that_draws_them() -> None:
    wanted = "speculation.acceptance: rejection needs the method draft_model or eagle3, and here it is ngram"
    assert refusal(SpeculationParams(acceptance=REJECTION), Rules(), (NGRAM,)) == wanted
    assert refusal(SpeculationParams(method=NGRAM), Rules(default=REJECTION)) == wanted
