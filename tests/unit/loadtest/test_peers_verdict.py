"""What the peers bench makes of its figures."""

from __future__ import annotations

from loadtest.peers.bench import cases_of, median_figure, ratios
from loadtest.peers.run import PeerFigure


def figure(peer: str, mode: str, streams: int, rate: float, error: str | None = None) -> PeerFigure:
    return PeerFigure(peer=peer, mode=mode, streams=streams, decode_tokens_per_s=rate, error=error)


PEERS = [
    figure("vllm", "plain", 1, 80.0),
    figure("openvino-genai", "plain", 1, 100.0),
    figure("openvino-genai", "draft", 1, 200.0),
    figure("openvino-genai", "plain", 8, 400.0),
    figure("openvino-genai", "draft", 8, 900.0),
]


def found(*rounds: list[PeerFigure]) -> dict[str, float]:
    return {at: round(trial.ratio, 3) for at, trial in ratios(cases_of(rounds)).items()}


def test_the_fleet_speculates_against_the_best_of_one_stream_and_the_plain_figure_of_more() -> None:
    ours = [figure("paceline", "plain", 1, 70.0), figure("paceline", "draft", 1, 300.0)]
    ours += [figure("paceline", "plain", 8, 300.0), figure("paceline", "draft", 8, 500.0)]
    assert found([*PEERS, *ours]) == {"1": 1.5, "8": 1.25}


def test_the_better_placement_of_the_drafter_counts() -> None:
    ours = [figure("paceline", "draft", 8, 300.0), figure("paceline in turn", "draft", 8, 380.0)]
    trials = ratios(cases_of([[*PEERS, *ours]]))
    assert trials["8"].ratio == 0.95
    assert not trials["8"].meets(least=1.0)


def test_without_peers_there_is_no_ratio() -> None:
    failed = figure("vllm", "plain", 1, 0.0, "not installed")
    assert found([failed, figure("paceline", "draft", 1, 300.0)]) == {}


def test_ratios_are_medians_of_those_within_a_round() -> None:
    # A machine twice as fast in one round changes no ratio of it.
    rounds = [
        [figure("paceline", "draft", 1, 240.0 * speed), figure("vllm", "draft", 1, 200.0 * speed)]
        for speed in (1.0, 2.0, 0.5)
    ]
    rounds.append([figure("paceline", "draft", 1, 100.0), figure("vllm", "draft", 1, 200.0)])
    assert found(*rounds) == {"1": 1.2}


def test_a_figure_is_the_median_of_the_rounds_that_have_one() -> None:
    failed = figure("vllm", "plain", 1, 0.0, "was not done")
    case = [figure("vllm", "plain", 1, rate) for rate in (90.0, 100.0, 200.0)]
    assert median_figure([*case, failed]).decode_tokens_per_s == 100.0
    assert median_figure([failed, failed]) == failed
