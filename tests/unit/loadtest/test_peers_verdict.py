"""What the peers bench makes of its figures."""

from __future__ import annotations

from loadtest.peers.ours import verdict
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
    assert found["ok"]


def test_the_better_placement_of_the_drafter_counts() -> None:
    ours = [figure("paceline", "draft", 8, 300.0), figure("paceline in turn", "draft", 8, 420.0)]
    assert verdict(ours, ENGINE, PEERS)["to_best_peer"] == {"8": 1.05}


def test_an_engine_that_is_faster_makes_no_slower_fleet_good() -> None:
    ours = [figure("paceline", "draft", 1, 300.0), figure("paceline", "draft", 8, 399.0)]
    assert not verdict(ours, ENGINE, PEERS)["ok"]


def test_without_peers_nothing_is_good() -> None:
    failed = [PeerFigure(peer="fast", mode="plain", streams=1, error="not installed")]
    found = verdict([figure("paceline", "draft", 1, 300.0)], ENGINE, failed)
    assert not any(found.values())
