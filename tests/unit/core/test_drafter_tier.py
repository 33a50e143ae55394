"""A verifier merges the messages that wait of its drafters in one call, as it would one by one."""

from __future__ import annotations

from paceline.core.drafter_tier import DrafterTier
from paceline.core.link import SessionLink
from paceline.core.messages import GenerateRequest
from paceline.core.params import METHODS, SamplingParams, SpeculationParams
from paceline.core.target_events import DraftsArrived, LinkChanged, StepReport
from paceline.core.tree import DraftTree
from paceline.forest import Forest
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts

VOCAB_SIZE, SAMPLING = 50, SamplingParams(max_tokens=9)


def connected() -> DrafterTier:
    """Sessions 1 and 2 of a drafter, and 3 of another one, all of three tokens."""
    tier = DrafterTier(VOCAB_SIZE, forest := Forest(METHODS))
    for number, address in enumerate(("d:1", "d:1", "d:2"), start=1):
        request = GenerateRequest(
            session_id="s", epoch=0, prompt_token_ids=(1,), sampling=SAMPLING, speculation=SpeculationParams()
        )
        tier.connect(SessionLink(request, number, [1, 2, 3], DraftTree(forest, [1, 2, 3]), {}, address=address))
    for address in ("d:1", "d:2"):
        tier.change(LinkChanged(address=address, up=True), 0.0)
    return tier


def arrived(address: str, at_s: float, sessions: dict[int, list[tuple[int, int, int]]]) -> DraftsArrived:
    """A message with guesses of sessions: ids, parents' ids and tokens."""
    said = [SessionDrafts(number, 3, [NodeGuess(*each, 0.5) for each in some]) for number, some in sessions.items()]
    return DraftsArrived(address=address, messages=[to_drafts(*said)], arrived_s=at_s)


def test_messages_that_wait_are_merged_together_as_they_would_be_one_by_one() -> None:
    said = [
        arrived("d:1", 0.25, {1: [(1, 0, 7), (2, 1, 8)], 2: [(1, 0, 9)]}),
        arrived("d:2", 0.375, {3: [(1, 0, 4)]}),
        # A child of an earlier guess, a session of another drafter, a token beyond the vocabulary, and an orphan.
        arrived("d:1", 0.5, {1: [(3, 2, 5)], 3: [(2, 0, 6)], 2: [(2, 1, VOCAB_SIZE), (3, 9, 6)]}),
    ]
    tiers, reports = (connected(), connected()), (StepReport(), StepReport())
    tiers[0].receive(said, reports[0])
    for each in said:
        tiers[1].receive([each], reports[1])
    together, one_by_one = (
        [column.tobytes() for column in (*tier.forest.arrays, *tier.forest.links.arrays)] for tier in tiers
    )
    assert together == one_by_one
    assert reports[0].counts == reports[1].counts == {("paceline:draft_nodes", "draft_model", "late"): 2}
    assert [sorted(*report.samples.values()) for report in reports] == [[0.25, 0.25, 0.375]] * 2
    assert sorted(tiers[0].forest.count(row) for row in range(8))[-3:] == [1, 1, 3]


def test_a_drafter_that_breaks_the_protocol_loses_its_stream_and_no_other_does() -> None:
    tier = connected()
    strange = to_drafts(SessionDrafts(1, 4, [NodeGuess(1, 0, 7, 0.5)]))
    broken = DraftsArrived(address="d:1", messages=[strange], arrived_s=0.25)
    tier.receive([broken, arrived("d:2", 0.25, {3: [(1, 0, 4)]})], StepReport())
    assert [*tier.take()[1]] == ["d:1"]
    assert sum(tier.forest.count(row) for row in range(8)) == 1
