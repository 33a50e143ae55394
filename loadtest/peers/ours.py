"""Paceline's own figures beside the peers': the whole fleet, on the same cores, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadtest.client import Ask, BatchResult, asks_of, run_batch
from loadtest.fleet import bench_fleet
from loadtest.peers.run import PeerBench, PeerFigure, best_figure
from loadtest.trial import Trial
from paceline.verifier.config import DEFAULT_METHODS, IN_VERIFIER

OURS = "paceline"
IN_TURN = "paceline in turn"
MODES = {"plain": {"enabled": False}, "draft": {"enabled": True}}


def measure_ours(bench: PeerBench) -> list[PeerFigure]:
    """Measures the whole fleet at the numbers of streams of the bench.

    As `paceline up` starts it, plain and speculating; and speculating with the drafter inside the verifier, where both
    models run on all cores in turn, as they do in every peer.
    """
    return asyncio.run(_measure(bench))


async def _measure(bench: PeerBench) -> list[PeerFigure]:
    inside = json.dumps({"method": DEFAULT_METHODS, "placement": IN_VERIFIER, "model": str(bench.draft)})
    async with bench_fleet(model=bench.target, draft_model=bench.draft) as fleet:
        figures = await _figures(OURS, fleet.gateway_url, tuple(MODES), bench)
    async with bench_fleet(model=bench.target, drafter=False, speculative_config=inside) as fleet:
        return figures + await _figures(IN_TURN, fleet.gateway_url, ("draft",), bench)


async def _figures(name: str, url: str, modes: Sequence[str], bench: PeerBench) -> list[PeerFigure]:
    figures: list[PeerFigure] = []
    for streams in bench.plain:
        asks = _asks(bench, streams)
        for mode in modes:
            passes = [
                [await run_batch(url, wave, streams, f"{name}, {mode}, {streams} streams")
                 for wave in _waves(asks, streams, MODES[mode])]
                for _ in range(bench.passes + 1)
            ]  # fmt: skip
            # The first pass fills the prefix cache and lets the controller meet the load.
            figures.append(_figure(name, mode, streams, passes[1:]))
    return figures


def _asks(bench: PeerBench, streams: int) -> list[Ask]:
    count = streams * max(1, bench.least_prompts // streams)
    return asks_of(count, bench.max_new_tokens)


def _waves(asks: Sequence[Ask], streams: int, speculation: dict[str, Any]) -> list[list[Ask]]:
    asked = [replace(each, speculation=speculation) for each in asks]
    return [asked[start : start + streams] for start in range(0, len(asked), streams)]


def _figure(name: str, mode: str, streams: int, passes: Sequence[Sequence[BatchResult]]) -> PeerFigure:
    decode, total = zip(*(_speeds(waves) for waves in passes), strict=True)
    return PeerFigure(
        peer=name,
        precision="bfloat16",
        mode=mode,
        streams=streams,
        decode_tokens_per_s=statistics.median(decode),
        total_tokens_per_s=statistics.median(total),
        num_tokens=sum(each.num_tokens for wave in passes[0] for each in wave.completions),
    )


def _speeds(waves: Sequence[BatchResult]) -> tuple[float, float]:
    """Tokens/s while all streams decoded, and over all: as the peers' are counted."""
    tokens = seconds = 0.0
    for wave in waves:
        first_s = max(each.started_s + each.piece_times_s[0] for each in wave.completions)
        last_s = min(each.started_s + each.piece_times_s[-1] for each in wave.completions)
        tokens += sum(each.tokens_until(last_s) - each.tokens_until(first_s) for each in wave.completions)
        seconds += last_s - first_s
    everything = sum(each.num_tokens for wave in waves for each in wave.completions)
    return tokens / seconds, everything / sum(wave.seconds for wave in waves)


def verdict(
    ours: Sequence[PeerFigure], engine: Sequence[PeerFigure], peers: Sequence[PeerFigure]
) -> dict[str, dict[str, float]]:
    """Ours over the best peer, which has neither server nor client beside it on the same cores.

    The whole fleet as served (with speculation on, by the better placement of the drafter) is held against a peer's
    best at 1 stream, and against its plain figure at more; so is our engine alone, in one process as the peers are, and
    it is plain against plain as well.
    """
    fleet: dict[str, float] = {}
    alone: dict[str, float] = {}
    speculating: dict[str, float] = {}
    for streams in sorted({each.streams for each in ours}):
        best = best_figure(peers, streams=streams, mode=None if streams == 1 else "plain")
        _add_ratio(fleet, streams, best_figure(ours, streams=streams, mode="draft"), best)
        plain = best_figure(peers, streams=streams, mode="plain")
        _add_ratio(alone, streams, best_figure(engine, streams=streams, mode="plain"), plain)
        _add_ratio(speculating, streams, best_figure(engine, streams=streams, mode="draft"), best)
    return {
        "to_best_peer": fleet,
        "engine_to_best_peer": alone,
        "speculating_engine_to_best_peer": speculating,
    }


def median_verdict(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of the ratios of several rounds, each measured within its round; `ok` by the fleet's."""
    trials = {
        name: {
            streams: Trial(tuple(each[name][streams] for each in rounds if streams in each[name]))
            for streams in sorted({streams for each in rounds for streams in each[name]}, key=int)
        }
        for name in rounds[0]
    }
    ratios = {
        name: {streams: round(trial.ratio, 3) for streams, trial in each.items()} for name, each in trials.items()
    }
    fleet = trials["to_best_peer"]
    return {**ratios, "ok": bool(fleet) and all(trial.meets(least=1.0) for trial in fleet.values())}


def median_figures(rounds: Sequence[Sequence[PeerFigure]]) -> list[PeerFigure]:
    """The figures of the first round with the median speeds of all rounds in which there is one."""
    by_case: dict[tuple[Any, ...], list[PeerFigure]] = {}
    for figure in itertools.chain.from_iterable(rounds):
        case = by_case.setdefault((figure.peer, figure.mode, figure.streams, figure.draft_length), [])
        case.append(figure)
    return [_median_figure(case) for case in by_case.values()]


def _median_figure(case: Sequence[PeerFigure]) -> PeerFigure:
    measured = [each for each in case if not each.error]
    if not measured:
        return case[0]
    return replace(
        measured[0],
        decode_tokens_per_s=statistics.median(each.decode_tokens_per_s for each in measured),
        total_tokens_per_s=statistics.median(each.total_tokens_per_s for each in measured),
    )


def _add_ratio(ratios: dict[str, float], streams: int, mine: PeerFigure | None, best: PeerFigure | None) -> None:
    if mine is not None and best is not None:
        ratios[str(streams)] = round(mine.decode_tokens_per_s / best.decode_tokens_per_s, 3)
