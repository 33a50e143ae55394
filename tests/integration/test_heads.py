"""Heads that are right are believed, and a target that drafts with all its layers agrees with itself."""

from __future__ import annotations

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.params import LAYER_SKIP, MEDUSA, SamplingParams, SpeculationParams
from paceline.drafting.early_exit import EarlyExitSource
from paceline.engine.target_session import SHORT_REMAINDER
from tests.support.checkpoints import save_pair
from tests.support.engines import EnginePair
from tests.support.heads import CIRCLE, save_counting_medusa, save_counting_target
from tests.support.trees import turns

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PROMPTS = [[7], [3, 250, 251, 90], list(range(100, 160))]


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """The counting target, and heads that count with it."""
    folder = tmp_path_factory.mktemp("counting")
    return save_counting_target(folder / "target"), save_counting_medusa(folder / "heads")


def counting_pair(counting, **options) -> EnginePair:
    """An engine of the counting target that drafts with its heads."""
    target, heads = counting
    options.setdefault("policy", FixedGamma(gamma=3))
    pair = EnginePair(target, target, methods=(MEDUSA,), medusa_model=heads, **options)
    pair.kill_drafter()
    return pair


def counted_from(prompt) -> list[int]:
    return [(prompt[-1] + step) % CIRCLE for step in range(1, GREEDY.max_tokens + 1)]


def test_right_heads_commit_a_token_a_head_and_one_more_each_step(counting):
    pair = counting_pair(counting)
    for index, prompt in enumerate(PROMPTS):
        pair.submit(f"s{index}", prompt, GREEDY)
    pair.run()
    for index, prompt in enumerate(PROMPTS):
        assert pair.sessions[f"s{index}"].token_ids == counted_from(prompt)
        record = pair.sessions[f"s{index}"].result.speculation
        # The first token comes alone, then four a step, and the last ones alone again: they are not delayed for drafts.
        assert record.num_steps <= 1 + 8 + SHORT_REMAINDER


def test_they_are_right_after_preemption_and_from_cached_pages(counting):
    pair = counting_pair(counting, num_blocks=12)
    for name in ("a", "b", "c"):
        pair.submit(name, PROMPTS[2], GREEDY)
    pair.run()
    assert pair.num_preempted > 0, "the pool must be too small, or this proves nothing"
    pair.submit("cached", PROMPTS[2], GREEDY)
    pair.run()
    assert pair.sessions["cached"].result.num_cached_tokens > 0
    for session in pair.sessions.values():
        assert session.token_ids == counted_from(PROMPTS[2])
        assert session.result.speculation.num_accepted_draft_tokens > 20


def test_a_resumed_session_drafts_from_its_second_token_on(counting):
    pair = counting_pair(counting)
    pair.submit("s", PROMPTS[1], GREEDY, committed=counted_from(PROMPTS[1])[:1])
    pair.run()
    assert pair.sessions["s"].token_ids == counted_from(PROMPTS[1])[1:]
    assert pair.sessions["s"].result.speculation.num_accepted_draft_tokens > 20


def test_short_answers_are_not_delayed_for_drafts(counting):
    pair = counting_pair(counting)
    pair.submit("s", PROMPTS[0], SamplingParams(max_tokens=SHORT_REMAINDER, temperature=0.0))
    pair.run()
    assert pair.sessions["s"].token_ids == counted_from(PROMPTS[0])[:SHORT_REMAINDER]
    assert not any(turns(report) for report in pair.reports)


def run_long(pair, count=4) -> None:
    for index in range(count):
        pair.submit(f"s{index}", [index + 3], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    pair.run()


class Drafting(Goodput):
    """Drafts in every step, whatever pays."""

    @property
    def drafts(self):
        return True


def test_a_good_source_is_asked_after_every_step_that_leaves_it_enough_to_do(counting):
    pair = counting_pair(counting, policy=Drafting())
    run_long(pair, 2)
    num_turns = 0
    for session in pair.sessions.values():
        said = 0
        for message in session.messages:
            said += len(message.token_ids)
            # Not the message that says that it runs.
            num_turns += bool(message.token_ids) and 400 - said >= SHORT_REMAINDER
    assert sum(turns(report)[MEDUSA] for report in pair.reports) == num_turns > 100


def test_all_sources_are_asked_while_a_verifier_drafts(counting):
    target, heads = counting
    policy = FixedGamma(gamma=3)
    pair = EnginePair(target, target, methods=(MEDUSA, LAYER_SKIP), medusa_model=heads, layers=(0, 1), policy=policy)
    pair.kill_drafter()
    run_long(pair)
    asked = [found for report in pair.reports if (found := turns(report))]
    assert len(asked) > 50
    assert all(each[MEDUSA] == each[LAYER_SKIP] > 0 for each in asked)


ALL_LAYERS = (0, 1)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=11, frequency_penalty=0.4, ignore_eos=True)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_blocks", [64, 10], ids=["", "few pages"])
def test_with_all_its_layers_a_target_always_accepts_its_own_drafts(tmp_path, sampling, num_blocks):
    target, _ = save_pair(tmp_path)
    pair = EnginePair(
        target,
        target,
        policy=FixedGamma(gamma=5),
        sources=lambda decoder: [EarlyExitSource(decoder, ALL_LAYERS, cost=0.0, width=1)],
        num_blocks=num_blocks,
    )
    pair.kill_drafter()
    for index, prompt in enumerate(PROMPTS):
        pair.submit(f"s{index}", prompt, sampling)
        pair.submit(f"plain{index}", prompt, sampling, SpeculationParams(enabled=False))
    pair.run()
    assert (pair.num_preempted > 0) == (num_blocks == 10)
    for index in range(len(PROMPTS)):
        drafted, plain = pair.sessions[f"s{index}"], pair.sessions[f"plain{index}"]
        assert drafted.token_ids == plain.token_ids
        record = drafted.result.speculation
        assert record.num_accepted_draft_tokens == record.num_draft_tokens > 20
