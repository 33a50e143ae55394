"""What `--speculative-config` may say."""

from __future__ import annotations

import pytest

from paceline.core.acceptance_rules import Rules, Typical
from paceline.core.errors import ConfigError
from paceline.core.params import (
    BLOCK,
    COUPLED,
    TYPICAL,
)
from paceline.verifier.config import speculation_from


def test_the_coupled_rule_is_the_default_and_no_lossy_one_is_served() -> None:
    assert speculation_from("{}").rules == Rules(default=COUPLED, more=())


def test_a_deployment_may_have_another_default() -> None:
    assert speculation_from('{"acceptance": "block"}').rules.default == BLOCK


def test_lossy_serves_the_typical_rule_with_its_parameters() -> None:
    assert speculation_from('{"lossy": true}').rules == Rules(
        more=(Typical(posterior_threshold=0.09, posterior_alpha=0.3),)
    )
    given = '{"lossy": true, "acceptance": "typical", "posterior_threshold": 0.2, "posterior_alpha": 1}'
    expected = Rules(default=TYPICAL, more=(Typical(posterior_threshold=0.2, posterior_alpha=1.0),))
    assert speculation_from(given).rules == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"acceptance": "lucky"}', "'lucky' is not known here; there are coupled, rejection, block, typical"),
        ('{"acceptance": "typical"}', 'acceptance typical is lossy, and needs "lossy": true'),
        ('{"lossy": "yes"}', "lossy must be true or false, got 'yes'"),
        (
            '{"acceptance": "block", "method": "ngram"}',
            "acceptance block needs the method draft_model or eagle3, got ngram",
        ),
        ('{"lossy": true, "posterior_alpha": 0}', "posterior_alpha must be a number above 0 and at most 1, got 0"),
        ('{"posterior_threshold": 2}', "posterior_threshold must be a number above 0 and at most 1, got 2"),
    ],
)
def test_what_cannot_be_served_stops_the_start(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        speculation_from(given)
