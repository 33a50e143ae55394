"""Devices that take their time and compute nothing: texts by digest, steps by a profile, guesses by a law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages
from paceline.engine.batch import Batch
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.engine.pending import HostPending, greedy_roots
from paceline.simulated.device import DigestCache, Pace
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.model import Simulation, find_profile
from paceline.simulated.roofline import computed_profile
from paceline.simulated.text import next_tokens

PROFILE = computed_profile("70b+1b@4xh100+l4")
STILL = replace(PROFILE, target=replace(PROFILE.target, noise=0.0))
TOKENS = [5, 9, 9, 7, 300, 12, 44, 5, 9, 9, 7, 300, 12, 44, 8, 8, 8, 21, 4, 77]
SCRATCH = 40 * BLOCK_SIZE


def pages_of(tokens: list[int], pool: BlockPool) -> SessionPages:
    pages = SessionPages(list(tokens), pool)
    assert pages.reserve(len(tokens) + 8)
    return pages


def prefix(pages: SessionPages, start: int, stop: int) -> Batch:
    builder = BatchBuilder()
    builder.add_prefixes([PrefixRows(pages, start, stop, wants_logits=True)])
    return builder.build()


def digest_of(tokens: list[int]) -> int:
    pages, cache = pages_of(tokens, BlockPool(32)), DigestCache(64)
    return int(cache.write(prefix(pages, 0, len(tokens)))[-1])


def test_a_text_has_one_digest_however_it_is_cut_into_steps_and_another_order_another_one() -> None:
    whole = digest_of(TOKENS)
    pages, cache = pages_of(TOKENS, BlockPool(32)), DigestCache(64)
    digests = [
        int(each)
        for start, stop in ((0, 3), (3, 4), (4, 19), (19, 20))
        for each in cache.write(prefix(pages, start, stop))
    ]
    assert digests == [digest_of(TOKENS[:length]) for length in range(1, 1 + len(TOKENS))]
    assert digests[-1] == whole
    assert digest_of([*TOKENS[:-2], TOKENS[-1], TOKENS[-2]]) != whole


def test_sequences_of_one_step_do_not_mix() -> None:
    pool, cache = BlockPool(32), DigestCache(64)
    first, second = pages_of(TOKENS, pool), pages_of(TOKENS[::-1], pool)
    cache.write(prefix(second, 0, 7))
    builder = BatchBuilder()
    builder.add_prefixes([PrefixRows(first, 0, 20, wants_logits=True)])
    builder.add_prefixes([PrefixRows(second, 7, 20, wants_logits=True)])
    batch = builder.build()
    found = cache.write(batch)[batch.logit_rows]
    assert [int(each) for each in found] == [digest_of(TOKENS), digest_of(TOKENS[::-1])]


def test_a_guess_has_the_digest_of_its_path_also_after_it_was_accepted() -> None:
    pages, cache = pages_of(TOKENS, BlockPool(32)), DigestCache(64)
    cache.write(prefix(pages, 0, 19))
    builder = BatchBuilder()
    builder.add_prefixes([PrefixRows(pages, 19, 20, wants_logits=True)])
    root, child, sibling = SCRATCH, SCRATCH + 1, SCRATCH + 2
    builder.add_nodes(
        [
            TreeRow(pages, 61, 20, (root,)),
            TreeRow(pages, 62, 21, (root, child)),
            TreeRow(pages, 63, 21, (root, sibling)),
        ]
    )
    found = [int(each) for each in cache.write(builder.build())]
    texts = [TOKENS, [*TOKENS, 61], [*TOKENS, 61, 62], [*TOKENS, 61, 63]]
    assert found == [digest_of(text) for text in texts]
    moves = [(SCRATCH, pages.slot(20)), (SCRATCH + 2, pages.slot(21))]
    cache.apply_moves(moves)
    assert moves == []
    pages.tokens += [61, 63, 99]
    assert int(cache.write(prefix(pages, 22, 23))[0]) == digest_of([*TOKENS, 61, 63, 99])


def test_a_step_takes_the_time_of_its_rows_sessions_and_kv_and_leaves_the_interpreter_meanwhile() -> None:
    slept: list[float] = []
    pace = Pace(STILL.target, clock=lambda: 10.004, sleep=slept.append)
    batch = prefix(pages_of(TOKENS, BlockPool(32)), 0, 20)
    expected = STILL.target.step_s(20, num_sessions=1, kv_tokens=20)
    assert pace.seconds(batch) == pytest.approx(expected)
    pace.keep(10.0, batch)
    assert slept == [pytest.approx(expected - 0.004)]
    pace.keep(0.0, batch)
    assert len(slept) == 1


def test_a_text_is_made_of_words_and_does_not_end() -> None:
    simulation = Simulation(profile=STILL, folder=DEMO_TARGET)
    digests = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert not np.any(next_tokens(simulation._words, digests) == simulation.identity("").eos_token_ids[0])
    text = simulation._tokenizer.decode(next_tokens(simulation._words, digests[:60]).tolist())
    assert len(text.split()) > 30


@pytest.mark.parametrize("chance", [0.3, 0.8])
def test_a_drafter_guesses_right_as_often_as_it_is_told_and_is_as_sure_as_that(chance: float) -> None:
    simulation = Simulation(profile=replace(PROFILE, acceptance=GuessLaw.at(chance)), folder=DEMO_TARGET)
    draft = simulation.draft(Pace(PROFILE.drafter))
    digests = np.arange(4_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    logits, truth = draft._guesses(digests), next_tokens(simulation._words, digests)
    best = logits.argmax(axis=1)
    assert np.mean(best == truth) == pytest.approx(chance, abs=0.03)
    row = np.sort(logits[0])[::-1].astype(np.float64)
    shares = np.exp(row) / np.exp(row).sum()
    assert confidences(shares[:NUM_RANKED], greedy=True)[0] == pytest.approx(chance, abs=0.01)


def test_guesses_of_one_chance_have_it_on_average() -> None:
    ranks, _ = GuessLaw.at(0.7).drawn()
    assert np.mean(ranks == 0) == pytest.approx(0.7, abs=0.03)


def test_a_profile_is_found_by_file_or_name_and_refused_otherwise() -> None:
    assert find_profile("8b+1b@h100+l4").name == "8B on 1 x H100 SXM, 1B on L4"
    for name, problem in (("huge+1b@h100+l4", "no model 'huge' is known"), ("nowhere.json", "nowhere.json")):
        with pytest.raises(ConfigError, match=problem):
            find_profile(name)


@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_that_are_known_go_down_the_guesses_as_the_logits_would(greedy: bool) -> None:
    target = Simulation(profile=STILL, folder=DEMO_TARGET).target()
    pool, cache = BlockPool(32), target.new_cache(64)
    batch = prefix(pages_of(TOKENS, pool), 0, len(TOKENS))
    request = greedy_roots(1)
    request.choices["greedy"] = greedy
    pending = target.launch(batch, cache, request)
    by_logits = HostPending(pending.logits([0])).follow(request)
    known = pending.follow(request)
    assert (known.tokens.tolist(), known.counts.tolist()) == (by_logits.tokens.tolist(), by_logits.counts.tolist())
    assert int(pending.logits([0])[0].argmax()) == known.tokens[0]
