"""The arithmetic of the routing bench: its verifiers, its traces, its verdict."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from loadtest.conversations import TRACE_BLOCK, Request, full_blocks, generated, paced, read_trace, tokens_of
from loadtest.routing import LEAST_LOADED, OURS, PREFIX_ONLY, ROUND_ROBIN, figures
from loadtest.routing_policies import LeastLoaded, RoundRobin, Routed
from loadtest.routing_world import Outcome, PrefixCache, Simulation, pooled_hit_rate

from paceline.core.messages import VERIFIER
from paceline.store.base import Replica


def request(at_s: float, num_blocks: int, first_id: int = 0, num_output_tokens: int = 1) -> Request:
    """A prompt of whole blocks, ids counted up from the first."""
    return Request(
        at_s=at_s,
        num_input_tokens=num_blocks * TRACE_BLOCK,
        num_output_tokens=num_output_tokens,
        block_ids=tuple(range(first_id, first_id + num_blocks)),
    )


def play(*requests: Request, num_verifiers: int = 1, cache_tokens: int = 100 * TRACE_BLOCK) -> Outcome:
    return Simulation(
        requests, RoundRobin(), num_verifiers=num_verifiers, num_gateways=1, cache_tokens=cache_tokens
    ).run()


def test_prompts_are_computed_one_after_the_other_at_ten_thousand_tokens_a_second() -> None:
    outcome = play(request(0.0, 100, 0), request(1.0, 50, 1_000))
    assert outcome.hit_rate == 0
    np.testing.assert_allclose(outcome.waits_s, [0.0, 4.12])
    np.testing.assert_allclose(outcome.ttfts_s, [5.12, 6.68])
    assert outcome.mean_ttft_s == pytest.approx(5.9)


def test_what_is_cached_costs_nothing_but_the_last_token() -> None:
    outcome = play(request(0.0, 10), request(1.0, 10), request(2.0, 20))
    np.testing.assert_allclose(outcome.ttfts_s, [0.512, 0.0001, 0.512])
    assert outcome.hit_rate == pytest.approx((5_119 + 5_120) / 20_480)


def test_a_prompt_is_cached_once_it_is_computed_and_on_its_verifier_only() -> None:
    first, again = request(0.0, 10), request(1.0, 10)
    assert play(first, again, num_verifiers=2).hit_rate == 0
    assert play(first, again, cache_tokens=0).hit_rate == 0


def test_an_answer_is_cached_when_its_session_ends() -> None:
    turn = replace(request(0.0, 1, num_output_tokens=TRACE_BLOCK), final_block_ids=(0, 1))
    end_s = 0.0512 + 0.03 * TRACE_BLOCK
    early, late = request(end_s - 0.1, 2), request(end_s + 0.1, 2)
    np.testing.assert_allclose(play(turn, early).ttfts_s[1], 0.0512)
    np.testing.assert_allclose(play(turn, late).ttfts_s[1], 0.0001)


def test_a_full_cache_forgets_the_end_of_what_was_used_longest_ago() -> None:
    cache = PrefixCache(4)
    cache.add([1, 2, 3])
    cache.add([7, 8])
    assert (cache.num_leading([1, 2, 3]), cache.num_leading([7, 8])) == (2, 2)


def test_spread_is_the_busiest_verifier_over_the_mean() -> None:
    outcome = play(request(0.0, 30, 0), request(0.0, 10, 100), num_verifiers=2)
    assert outcome.busy_spread == pytest.approx(1.5)


def test_gateways_see_the_load_of_the_last_heartbeat_half_a_beat_late() -> None:
    seen: list[list[int]] = []

    class Watching(RoundRobin):
        def place(self, gateway: int, it: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
            seen.append([replica.num_sessions for replica in replicas if replica.role == VERIFIER])
            return super().place(gateway, it, replicas, in_flight)

    arrivals = [request(at_s, 1, num_output_tokens=1_000) for at_s in (0.1, 1.1, 1.4, 1.6, 2.6)]
    Simulation(arrivals, Watching(), num_verifiers=1, num_gateways=1, cache_tokens=0).run()
    assert seen == [[0], [0], [0], [1], [4]]


def test_one_pool_holds_what_separate_caches_lose() -> None:
    turns = [request(float(number), 10) for number in range(3)]
    assert pooled_hit_rate(turns, 10 * TRACE_BLOCK) == pytest.approx(2 * 5_119 / 15_360)
    assert pooled_hit_rate(turns, 0) == 0


def test_tokens_are_equal_as_far_as_blocks_are() -> None:
    assert list(tokens_of([5, 6], TRACE_BLOCK + 2)) == [5] * TRACE_BLOCK + [6, 6]
    assert full_blocks([5, 6], TRACE_BLOCK + 2) == (5,)


def test_a_made_up_trace_is_the_same_for_the_same_seed_and_its_turns_grow() -> None:
    trace = generated(500, 3)
    assert trace == generated(500, 3) != generated(500, 4)
    assert [it.at_s for it in trace] == sorted(it.at_s for it in trace)
    opened = {it.final_block_ids[:-1]: it for it in trace if it.final_block_ids and len(it.final_block_ids) > 8}
    later = [
        (before, it)
        for it in trace
        for blocks, before in opened.items()
        if it.at_s > before.at_s and it.block_ids[: len(blocks)] == blocks
    ]
    assert later
    assert all(it.num_input_tokens > before.num_final_tokens for before, it in later)
    assert all(len(it.block_ids) == -(-it.num_input_tokens // TRACE_BLOCK) for it in trace)


def test_the_clock_is_stretched_to_the_load_asked_for_and_order_kept() -> None:
    trace = paced(generated(200, 0), 5_000.0)
    assert sum(it.num_input_tokens for it in trace) / trace[-1].at_s == pytest.approx(5_000.0)
    assert trace[0].at_s == 0


def test_a_public_trace_is_read_plain_and_gzipped_and_a_bad_line_is_named(tmp_path: Path) -> None:
    rows = [{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    expected = Request(at_s=1.5, num_input_tokens=600, num_output_tokens=7, block_ids=(0, 4))
    assert read_trace(plain) == read_trace(packed) == [expected]
    plain.write_text(text + '{"timestamp": 3}\n')
    with pytest.raises(ValueError, match=r"t\.jsonl, line 2: needs timestamp"):
        read_trace(plain)


def test_the_gateways_router_finds_more_than_the_least_load_and_waits_less() -> None:
    trace = paced(generated(600, 1), 0.7 * 4 * 10_000)

    def run(policy: LeastLoaded | Routed) -> Outcome:
        return Simulation(trace, policy, num_verifiers=4, num_gateways=1, cache_tokens=1_000_000).run()

    ours, least_loaded = run(Routed(1)), run(LeastLoaded())
    assert ours.hit_rate > 1.5 * least_loaded.hit_rate
    assert ours.mean_ttft_s < least_loaded.mean_ttft_s


def outcome(hit_rate: float, spread: float, ttft_s: float) -> Outcome:
    return Outcome(hit_rate=hit_rate, busy_spread=spread, waits_s=[0.0], ttfts_s=[ttft_s])


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (outcome(0.30, 1.1, 1.0), []),
        (outcome(0.26, 1.1, 1.0), ["hits_of_pooled"]),
        (outcome(0.30, 1.2, 1.0), ["spread"]),
        (outcome(0.30, 1.1, 2.5), ["mean_ttft", "p99_ttft"]),
    ],
)
def test_the_verdict_names_every_limit_that_was_missed(ours: Outcome, missed: list[str]) -> None:
    rivals = {LEAST_LOADED: outcome(0.1, 1.0, 2.0), ROUND_ROBIN: outcome(0.1, 1.0, 3.0)}
    found = figures({OURS: ours, **rivals, PREFIX_ONLY: outcome(0.1, 4.0, 9.0)}, 0.3, num_gateways=1)
    assert (found["missed"], found["ok"]) == (missed, not missed)
