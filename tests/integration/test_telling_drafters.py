"""What drafters are told: of a prompt before the step that reads it, and how far ahead to draft."""

from __future__ import annotations

import random

from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import Commit
from paceline.core.params import SamplingParams
from paceline.core.target_events import DrafterNews
from paceline.engine.loop import run_sync
from paceline.forest.linking import MOST_STEPS_AHEAD, ROOM_PER_NODE
from tests.support.engines import DRAFTER, EnginePair
from tests.support.guesses import each_commit

GREEDY = SamplingParams(max_tokens=30, temperature=0.0)


def test_a_drafter_reads_a_prompt_while_the_verifier_does(tiny_pair):
    rng = random.Random(3)
    prompt = [rng.randrange(250) for _ in range(40)]
    plain = EnginePair(*tiny_pair, policy=FixedGamma(gamma=0))
    plain.submit("s0", prompt, GREEDY)
    plain.run()
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    pair.submit("s0", prompt, GREEDY)
    told: list[DrafterNews] = []

    async def compute(call, *args):
        """The drafter reads the prompt before the verifier's device does anything."""
        for early in told:
            pair.hear(early)
        (drafts,) = run_sync(pair.draft.step()).to_verifiers[1]
        assert drafts.base_lens.tolist() == [len(prompt)]
        return call(*args)

    output = run_sync(pair.target.step(compute, told.append))
    early = told[0]
    assert [each.running for each in early.commit.events.values()] == [True]
    assert not early.commit.numbers
    assert [message.token_ids for message in early.to_drafters[DRAFTER]] == [tuple(prompt)]
    assert output.report.num_prefill_rows == len(prompt)
    queries = [each.report.counts["vllm:prefix_cache_queries",] for each in (early, output)]
    assert queries == [len(prompt), 0], "counted once"
    for later in (*told[1:], output):
        pair.hear(later)
    assert len(pair.sessions["s0"].token_ids) == 1
    pair.run()
    assert pair.sessions["s0"].token_ids == plain.sessions["s0"].token_ids


def test_a_drafter_whose_answers_are_late_is_given_room_for_more_steps_and_the_text_stays(tiny_pair):
    rooms: list[int] = []
    texts: list[list[int]] = []
    for late_s in (0.0, 60.0):
        pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
        now = pair.clock
        pair.clock = lambda now=now, late_s=late_s: now() + late_s
        pair.submit("s0", [7, 11, 13], GREEDY)
        pair.run()
        told = [message.room for message in pair.to_drafter if isinstance(message, Commit)]
        rooms.append(max(told[len(told) // 2 :]))
        texts.append(pair.sessions["s0"].token_ids)
    near, far = rooms
    assert near < far == ROOM_PER_NODE * 4 * MOST_STEPS_AHEAD
    assert texts[0] == texts[1]


def test_a_commit_is_told_in_the_middle_of_its_step_and_not_again_at_its_end(tiny_pair):
    pair = EnginePair(*tiny_pair, policy=FixedGamma(gamma=4))
    pair.submit("s0", [7, 11, 13], GREEDY)
    pair.round()
    told: list[DrafterNews] = []
    output = run_sync(pair.target.step(tell=told.append))
    (news,) = told
    (commit,) = each_commit(news.to_drafters[DRAFTER])
    assert commit.token_ids == output.commit.tokens
    assert output.to_drafters == {}
