"""Proof by enumeration that what is committed under `rejection` has the target's distribution, as it is served.

The drafter's distribution, sparse and in 16 bits, is sampled, sent and merged_in; verifier steps judge chains of 0 to 3
tokens, and the drafter draws on, comes late, forgets, dies or is replaced. Committed runs differ in length, so each
is completed with the target's own law (2302.01318, theorem 1).
"""

from __future__ import annotations

import pytest

from tests.contract.served_rule import STORIES, ToyModel, played
from tests.unit.core.toy_models import Law, total_variation

MODELS = {vocab: (ToyModel.random(10 + vocab, vocab), ToyModel.random(20 + vocab, vocab)) for vocab in (2, 3)}


def distance(law: Law, target: ToyModel) -> float:
    return total_variation(law, target.laws, max(map(len, law)))


STORIES_AND_VOCABULARIES = [
    *((story, 2) for story in STORIES),
    *(pytest.param(story, 3, marks=pytest.mark.full) for story in ("gamma 1", "gamma 2")),
]


@pytest.mark.parametrize(("story", "vocab"), STORIES_AND_VOCABULARIES)
def test_what_is_committed_has_the_distribution_of_the_target(
    monkeypatch: pytest.MonkeyPatch, story: str, vocab: int
) -> None:
    law = played(monkeypatch, MODELS[vocab], STORIES[story])
    assert distance(law, MODELS[vocab][0]) < 1e-12
