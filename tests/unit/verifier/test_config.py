"""What `--speculative-config` may say."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.core.params import COUPLED, REJECTION
from paceline.verifier.config import speculation_from


def test_a_deployment_may_have_another_rule_than_the_coupled_one_for_requests_that_name_none() -> None:
    assert speculation_from("{}").acceptance == COUPLED
    assert speculation_from('{"acceptance": "rejection"}').acceptance == REJECTION


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ('{"acceptance": "lucky"}', "acceptance must be one of coupled, rejection, got 'lucky'"),
        ('{"method": "ngram+mine"}', "method must be one of draft_model, eagle3, ngram.*got 'mine'"),
        (
            '{"acceptance": "rejection", "method": "ngram"}',
            "acceptance rejection needs the method draft_model or eagle3, got ngram",
        ),
    ],
)
def test_what_cannot_be_served_stops_the_start(given: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        speculation_from(given)
