"""What `--speculative-config` may say."""

from __future__ import annotations

import pytest

from paceline.core.acceptance_rules import Rules
from paceline.core.errors import ConfigError
from paceline.core.params import BLOCK, COUPLED
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
