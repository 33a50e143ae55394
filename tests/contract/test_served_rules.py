"""Proof by enumeration that what is committed under `rejection` and `block` has the target's law, as it is served.

The drafter's distribution, sparse and in 16 bits, is sampled, sent and grafted; verifier steps judge chains of 0 to 3
tokens, and the drafter draws on, comes late, forgets, dies or is replaced. Committed runs differ in length, so each
is completed with the target's own law (2302.01318, theorem 1).
"""

from __future__ import annotations

import pytest

from paceline.core.params import BLOCK, REJECTION
from tests.contract.served_rule import STORIES, Bugs, Play, ToyModel, played
from tests.unit.core.toy_models import Law, total_variation

MODELS = {vocab: (ToyModel.random(10 + vocab, vocab), ToyModel.random(20 + vocab, vocab)) for vocab in (2, 3)}
DETECTED = 1e-3


def distance(law: Law, target: ToyModel) -> float:
    return total_variation(law, target.laws, max(map(len, law)))


# Long ones; one of the rules shows in `make test` what would go wrong in them.
LONG = {
    "another drafter takes over in mid-chain",
    "what was not verified stays, and is drawn on",
    "a drafter forgets its chain and draws another beside it",
}
assert set(STORIES) >= LONG
RULES_AND_STORIES = [
    pytest.param(
        acceptance, story, vocab, marks=[pytest.mark.full] if story in LONG and acceptance == REJECTION else []
    )
    for story, vocab in [*((story, 2) for story in STORIES), ("gamma 1", 3), ("gamma 2", 3)]
    for acceptance in (REJECTION, BLOCK)
]


@pytest.mark.parametrize(("acceptance", "story", "vocab"), RULES_AND_STORIES)
def test_what_is_committed_has_the_law_of_the_target(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, story: str, vocab: int
) -> None:
    law = played(monkeypatch, acceptance, MODELS[vocab], STORIES[story])
    assert distance(law, MODELS[vocab][0]) < 1e-12


# Planted bugs: the same proof must find them


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
@pytest.mark.parametrize(
    ("story", "vocab", "bugs"),
    [
        # The top 2 are sampled, the whole distribution is sent (as in transformers issue 47932).
        pytest.param("gamma 2", 3, Bugs(num_sampled=2), id="reported is not sampled"),
        pytest.param("gamma 1", 3, Bugs(cut_below=0.3), id="truncation after looking at the token, gamma 1"),
        pytest.param("gamma 2", 3, Bugs(cut_below=0.3), id="truncation after looking at the token, gamma 2"),
        pytest.param("gamma 1", 2, Bugs(recovers_with_draft_noise=True), id="reused noise after the chain"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, story: str, vocab: int, bugs: Bugs
) -> None:
    law = played(monkeypatch, acceptance, MODELS[vocab], STORIES[story], bugs)
    assert distance(law, MODELS[vocab][0]) > DETECTED


def draws_anew(play: Play) -> None:
    """After a rejection the drafter draws again, for a position that it has drawn for before."""
    play.grow(2)
    play.deliver()
    play.verify(2)
    play.tell()
    play.grow(1)
    play.deliver()
    play.verify(1)


@pytest.mark.parametrize(
    ("acceptance", "harmless"), [pytest.param(REJECTION, True, marks=pytest.mark.full), (BLOCK, False)]
)
def test_planted_bug_reused_noise_in_a_draft_drawn_anew(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, harmless: bool
) -> None:
    """Fresh noise is the control. The rejection rule never looks behind a rejected token; a block is judged whole."""
    target, _ = MODELS[2]
    fresh = played(monkeypatch, acceptance, MODELS[2], draws_anew)
    reused = played(monkeypatch, acceptance, MODELS[2], draws_anew, Bugs(redraws_with_old_noise=True))
    assert distance(fresh, target) < 1e-12
    assert (distance(reused, target) < 1e-12) == harmless
    assert (distance(reused, target) > DETECTED) != harmless
