"""What the peers bench makes of its figures."""

from __future__ import annotations

from loadtest.peers.ours import median_figures, median_verdict, verdict
from loadtest.peers.run import PeerFigure


def figure(peer: str, mode: str, streams: int, rate: float) -> PeerFigure:
    return PeerFigure(peer=peer, mode=mode, streams=streams, decode_tokens_per_s=rate)


PEERS = [
    figure("slow", "plain", 1, 80.0),
    figure("fast", "plain", 1, 100.0),
    figure("fast", "draft", 1, 200.0),
    figure("fast", "plain", 8, 400.0),
    figure("fast", "draft", 8, 900.0),
]
ENGINE = [
    figure("paceline-engine", "plain", 1, 90.0),
    figure("paceline-engine", "draft", 1, 220.0),
    figure("paceline-engine", "plain", 8, 440.0),
    figure("paceline-engine", "draft", 8, 480.0),
]


def test_the_fleet_speculates_against_the_best_of_one_stream_and_the_plain_figure_of_more() -> None:
    ours = [figure("paceline", "plain", 1, 70.0), figure("paceline", "draft", 1, 300.0)]
    ours += [figure("paceline", "plain", 8, 300.0), figure("paceline", "draft", 8, 500.0)]
    found = verdict(ours, ENGINE, PEERS)
    assert found["to_best_peer"] == {"1": 1.5, "8": 1.25}
    assert found["engine_to_best_peer"] == {"1": 0.9, "8": 1.1}
    assert found["speculating_engine_to_best_peer"] == {"1": 1.1, "8": 1.2}
    assert median_verdict([found])["ok"]


def test_the_better_placement_of_the_drafter_counts() -> None:
    ours = [figure("paceline", "draft", 8, 300.0), figure("paceline in turn", "draft", 8, 420.0)]
    assert verdict(ours, ENGINE, PEERS)["to_best_peer"] == {"8": 1.05}


def test_an_engine_that_is_faster_makes_no_slower_fleet_good() -> None:
    ours = [figure("paceline", "draft", 1, 300.0), figure("paceline", "draft", 8, 399.0)]
    assert not median_verdict([verdict(ours, ENGINE, PEERS)])["ok"]


def test_without_peers_nothing_is_good() -> None:
    failed = [PeerFigure(peer="fast", mode="plain", streams=1, error="not installed")]
    found = verdict([figure("paceline", "draft", 1, 300.0)], ENGINE, failed)
    assert not any(found.values())
    assert not median_verdict([found])["ok"]


def test_ratios_are_medians_of_those_within_a_round() -> None:
    # A machine twice as fast in one round changes no ratio of it.
    rounds = [
        verdict([figure("paceline", "draft", 1, 240.0 * speed)], [], [figure("fast", "draft", 1, 200.0 * speed)])
        for speed in (1.0, 2.0, 0.5)
    ]
    rounds.append(verdict([figure("paceline", "draft", 1, 100.0)], [], [figure("fast", "draft", 1, 200.0)]))
    assert median_verdict(rounds) == {
        "to_best_peer": {"1": 1.2},
        "engine_to_best_peer": {},
        "speculating_engine_to_best_peer": {},
        "ok": True,
    }


def test_a_figure_is_the_median_of_the_rounds_that_have_one() -> None:
    failed = PeerFigure(peer="fast", mode="plain", streams=1, error="was not done")
    rounds = [[figure("fast", "plain", 1, rate), figure("fast", "draft", 1, 7.0)] for rate in (90.0, 100.0, 200.0)]
    merged = median_figures([*rounds, [failed]])
    assert [(each.mode, each.decode_tokens_per_s) for each in merged] == [("plain", 100.0), ("draft", 7.0)]
    assert median_figures([[failed], [failed]]) == [failed]
