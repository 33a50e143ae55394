"""The pure parts of the bench of vLLM's engines: who takes turns, and what is asked of the tier. vLLM is not run."""

from __future__ import annotations

import pytest
from loadtest.engines import PLAIN_ALL, PLAIN_SAME, TIER, Load, row_of, sides_of, speeds_at
from loadtest.peers.run import PeerFigure

SPEEDS = {
    PLAIN_ALL: [100, 200],
    PLAIN_SAME: [80, 160],
    "own, k = 3": [150, 300],
    "own, k = 7": [140, 310],
    TIER: [220, 440],
}


def row(load: Load, **tier: list[float]) -> dict[str, dict[str, object]]:
    return {each["of"]: each for each in row_of(load, {**SPEEDS, **tier})["asked"]}


def test_the_last_core_is_the_drafters_and_vllm_has_it_in_all_sides_without_a_tier() -> None:
    sides = sides_of([0, 1, 2], [3, 7])
    assert [(side.name, side.cores, side.draft_length, side.drafter_cores) for side in sides] == [
        (PLAIN_ALL, (0, 1, 2), None, ()),
        (PLAIN_SAME, (0, 1), None, ()),
        ("own, k = 3", (0, 1, 2), 3, ()),
        ("own, k = 7", (0, 1, 2), 7, ()),
        (TIER, (0, 1), 7, (2,)),
    ]


def test_one_stream_is_held_against_the_best_of_the_own_drafts_and_against_plain_on_the_same_cores() -> None:
    asked = row(Load(1, 0.0))
    assert (asked["own drafts"]["side"], asked["own drafts"]["met"]) == ("own, k = 3", True)
    assert asked["plain"] == {
        "of": "plain", "side": PLAIN_SAME, "ratio": 2.75, "error": 0.0, "least": 2.5, "met": True,
    }  # fmt: skip
    assert not row(Load(1, 0.0), tier=[190, 380])["plain"]["met"]


@pytest.mark.parametrize(("streams", "base", "side"), [(8, "the best other", "own, k = 3"), (32, "plain", PLAIN_SAME)])
def test_more_streams_are_held_against_the_best_and_in_the_end_against_plain(streams, base, side) -> None:
    assert {name: each["side"] for name, each in row(Load(streams, 0.0)).items()} == {base: side}


def test_above_temperature_0_plain_is_the_floor_at_any_load() -> None:
    for streams in (1, 8, 32):
        asked = row(Load(streams, 0.8), tier=[77, 154])
        assert (asked["plain"]["least"], asked["plain"]["met"]) == (0.97, False)


def test_figures_are_taken_round_by_round_at_their_load() -> None:
    side = sides_of([0, 1], [3])[0]
    rounds = [
        [
            PeerFigure(peer="vllm", streams=streams, temperature=temperature, decode_tokens_per_s=speed + streams)
            for streams in (1, 8)
            for temperature in (0.0, 0.8)
        ]
        for speed in (100.0, 200.0)
    ]
    assert speeds_at(Load(8, 0.8), {side: rounds}) == {PLAIN_ALL: [108.0, 208.0]}
