"""What a step waits for, of sessions with drafters and without."""

from __future__ import annotations

import numpy as np

from paceline.core.draft_policy import FIRST_STEP_S, FixedGamma
from paceline.core.link import ConnectedDrafter, SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import METHODS, SamplingParams, SpeculationParams
from paceline.core.step_drafts import StepDrafts
from paceline.core.target_events import StepReport
from paceline.core.tree import DraftTree
from paceline.forest import ROOT, Floats, Forest, Ints, rows_of


def linked(name: str, forest: Forest, *, drafted: bool) -> SessionLink:
    """A session with an empty tree, and a drafter if it has one."""
    request = GenerateRequest(
        session_id=name,
        epoch=0,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=50),
        speculation=SpeculationParams(),
    )
    tree = DraftTree(forest, request.prompt_token_ids)
    forest.links.bound(tree.row, most_guesses=4, last_len=52, waits_up_to=52)
    link = SessionLink(request, 1, [1, 2], tree, {}, address="d" if drafted else "")
    if drafted:
        link.connect(ConnectedDrafter(forest.links))
    return link


def rows_of_all(links: list[SessionLink]) -> Ints:
    return rows_of(link.tree.row for link in links)


class Patient:
    """A policy that always waits."""

    max_nodes, step_s = 4, FIRST_STEP_S

    def waits(self, *_: Floats, **__: float) -> bool:
        return True


def test_nobody_waits_longer_than_a_step_in_all() -> None:
    forest = Forest(METHODS)
    drafts, sessions = StepDrafts(Patient(), forest), [linked("a", forest, drafted=True)]
    assert drafts.worth_waiting(rows_of_all(sessions), np.array([1.0]), idle_s=0.0) == FIRST_STEP_S
    assert drafts.worth_waiting(rows_of_all(sessions), np.array([1.0]), idle_s=FIRST_STEP_S) == 0.0
    assert drafts.worth_waiting(rows_of_all(sessions), np.array([np.nan]), idle_s=0.0) == 0.0


def test_a_session_that_drafts_and_has_no_guess_is_an_unmet_draft() -> None:
    forest = Forest(METHODS)
    sessions = [
        linked("a", forest, drafted=True),
        linked("b", forest, drafted=True),
        linked("c", forest, drafted=False),
    ]
    drafts, rows = StepDrafts(FixedGamma(gamma=2), forest), rows_of_all(sessions)
    forest.add(sessions[0].tree.row, ROOT, 7, 0.9, 0)
    told = []
    for decoding in (rows, rows[:1], rows):
        drafts.choose(decoding, rows_of(()))
        drafts.describe(report := StepReport())
        told.append(report.counts["paceline:unmet_drafts",])
    assert told == [1, 0, 1], "the one with a guess is met, and the one without a drafter wants none"
