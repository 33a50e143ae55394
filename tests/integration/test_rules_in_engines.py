"""Stops, limits, log probabilities and lost drafters under the rejection rule, on real (tiny) engines."""

from __future__ import annotations

import random

import pytest

from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.messages import FinishReason
from paceline.core.params import NGRAM, REJECTION, SamplingParams, SpeculationParams
from tests.support.checkpoints import EOS_TOKEN_ID
from tests.support.engines import EnginePair
from tests.support.trees import nodes_of

GREEDY = SamplingParams(max_tokens=40, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=5, ignore_eos=True)
PROMPT = [random.Random(3).randrange(250) for _ in range(30)]


def engines(folders, **settings) -> EnginePair:
    return EnginePair(*folders, **{"policy": FixedGamma(gamma=4), **settings})


def run(pair: EnginePair, sampling: SamplingParams, name: str = "s", **speculation):
    pair.submit(name, PROMPT, sampling, SpeculationParams(acceptance=REJECTION, **speculation))
    pair.run()
    return pair.sessions[name]


@pytest.fixture(scope="module")
def plain(tiny_pair) -> list[int]:
    return run(engines(tiny_pair), GREEDY, enabled=False).token_ids


@pytest.mark.parametrize("policy", [FixedGamma(gamma=1), FixedGamma(gamma=6), Goodput()], ids=["1", "6", "goodput"])
def test_at_temperature_0_it_gives_the_greedy_text(tiny_pair, plain, policy):
    session = run(engines(tiny_pair, policy=policy, methods=(NGRAM,)), GREEDY)
    assert session.token_ids == plain
    # What pays is measured.
    assert session.result.speculation.num_accepted_draft_tokens or not isinstance(policy, FixedGamma)


def test_only_the_drafter_tier_feeds_a_chain(tiny_pair):
    pair = engines(tiny_pair, methods=(NGRAM,))
    pair.kill_drafter()
    assert run(pair, SAMPLED).result.speculation.num_draft_tokens == 0


def test_a_chain_has_no_branches_whatever_the_width(tiny_pair):
    pair = engines(tiny_pair, width=3)
    pair.submit("s", PROMPT, SAMPLED, SpeculationParams(acceptance=REJECTION))
    most = 0
    while pair.target.has_work():
        pair.round()
        assert pair.target.patience_s() >= 0.0, "guesses that wait are in the trees now"
        for session in pair.target.scheduler.running:
            nodes = nodes_of(session.tree)
            assert len({node.position for node in nodes}) == len(nodes)
            most = max(most, len(nodes))
    assert most > 3


def test_without_a_drafter_tokens_are_drawn_one_by_one(tiny_pair):
    pair = engines(tiny_pair)
    pair.kill_drafter()
    session = run(pair, SAMPLED)
    assert len(session.token_ids) == 40
    assert session.result.speculation.num_steps == 40


def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(tiny_pair, plain):
    stop = plain[9]
    sampling = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=(stop,), logprobs=1)
    session = run(engines(tiny_pair), sampling)
    assert session.token_ids == plain[: plain.index(stop) + 1]
    assert session.result.finish_reason is FinishReason.STOP
    assert [entry.token_id for step in session.messages for entry in step.logprobs] == session.token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 13])
def test_max_tokens_is_met_exactly(tiny_pair, max_tokens):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=True)
    session = run(engines(tiny_pair, policy=FixedGamma(gamma=8)), sampling)
    assert len(session.token_ids) == max_tokens
    assert session.result.finish_reason is FinishReason.LENGTH


def test_the_end_of_the_text_is_not_drawn_before_min_tokens(tiny_pair):
    sampling = SamplingParams(max_tokens=30, temperature=0.7, min_tokens=12, logit_bias=((EOS_TOKEN_ID, 100.0),))
    session = run(engines(tiny_pair), sampling)
    assert len(session.token_ids) == 13
    assert session.token_ids[-1] == EOS_TOKEN_ID


def test_log_probabilities_belong_to_the_committed_tokens(tiny_pair):
    sampling = SamplingParams(max_tokens=30, temperature=0.7, seed=2, logprobs=3, ignore_eos=True)
    session = run(engines(tiny_pair), sampling)
    entries = [entry for step in session.messages for entry in step.logprobs]
    assert [entry.token_id for entry in entries] == session.token_ids
    forced = engines(tiny_pair)
    for place in (7, 19):
        # The same row, computed alone after the same tokens, says the same of its best tokens.
        alone = SamplingParams(max_tokens=place + 1, temperature=0.0, logprobs=3, ignore_eos=True)
        forced.submit(f"{place}", PROMPT, alone, SpeculationParams(enabled=False), session.token_ids[:place])
        forced.run()
        assert forced.sessions[f"{place}"].messages[0].logprobs[0].top == entries[place].top


def test_a_drafter_is_equally_sure_of_every_token_of_a_chain(tiny_pair):
    pair = engines(tiny_pair)
    run(pair, SAMPLED)
    record = run(pair, SAMPLED, name="again").result.speculation
    assert record.num_accepted_draft_tokens > 0
    confidences = set()
    pair.submit("watched", PROMPT, SAMPLED, SpeculationParams(acceptance=REJECTION))
    while pair.target.has_work():
        pair.round()
        assert pair.target.patience_s() >= 0.0, "guesses that wait are in the trees now"
        for session in pair.target.scheduler.running:
            confidences |= {each for node in nodes_of(session.tree) for each in node.guesses.values()}
    assert len(confidences) == 1
