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


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
@pytest.mark.parametrize("story", STORIES)
def test_what_is_committed_has_the_law_of_the_target(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, story: str
) -> None:
    law = played(monkeypatch, acceptance, MODELS[2], STORIES[story])
    assert distance(law, MODELS[2][0]) < 1e-12


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
@pytest.mark.parametrize("gamma", [1, 2])
def test_so_it_has_with_three_tokens(monkeypatch: pytest.MonkeyPatch, acceptance: str, gamma: int) -> None:
    law = played(monkeypatch, acceptance, MODELS[3], STORIES[f"gamma {gamma}"])
    assert distance(law, MODELS[3][0]) < 1e-12


# Planted bugs: the same proof must find them


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
def test_planted_bug_the_reported_distribution_is_not_the_sampled_one(
    monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    """The top 2 are sampled, the whole distribution is sent (as in transformers issue 47932)."""
    law = played(monkeypatch, acceptance, MODELS[3], STORIES["gamma 2"], Bugs(num_sampled=2))
    assert distance(law, MODELS[3][0]) > DETECTED


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
@pytest.mark.parametrize("gamma", [1, 2])
def test_planted_bug_truncation_after_looking_at_the_token(
    monkeypatch: pytest.MonkeyPatch, acceptance: str, gamma: int
) -> None:
    law = played(monkeypatch, acceptance, MODELS[3], STORIES[f"gamma {gamma}"], Bugs(cut_below=0.3))
    assert distance(law, MODELS[3][0]) > DETECTED


@pytest.mark.parametrize("acceptance", [REJECTION, BLOCK])
def test_planted_bug_reused_noise_in_the_token_after_the_chain(
    monkeypatch: pytest.MonkeyPatch, acceptance: str
) -> None:
    bugs = Bugs(recovers_with_draft_noise=True)
    law = played(monkeypatch, acceptance, MODELS[2], STORIES["gamma 1"], bugs)
    assert distance(law, MODELS[2][0]) > DETECTED


def draws_anew(play: Play) -> None:
    """After a rejection the drafter draws again, for a position that it has drawn for before."""
    play.grow(2)
    play.deliver()
    play.verify(2)
    play.tell()
    play.grow(1)
    play.deliver()
    play.verify(1)


@pytest.mark.parametrize(("acceptance", "harmless"), [(REJECTION, True), (BLOCK, False)])
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
