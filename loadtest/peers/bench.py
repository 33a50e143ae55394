"""Peers side by side on one pair of models: `make bench NAME=peers`.

OpenVINO GenAI and vLLM decode the same prompts, plain and with the draft model as their own draft model, on
the same cores in bf16, and llama.cpp decodes them plainly; then our fleet over HTTP: as `paceline up` starts it, and
with the drafter inside the verifier, where both take turns as theirs do. The first run sets each peer up in the user's
cache folder (minutes); one that cannot be set up is left out with its reason. In the table

  decode, total   tokens/s while all streams decoded, and with prefill and stragglers
  differ          texts that are not those of the same peer's plain run at 1 stream; sampled ones all do

--pair smollm2 takes SmolLM2-135M-Instruct instead of the demo pair. llama.cpp is measured with it alone: with the GGUF
file as it ships, in four bits, and with the same weights in 16. A pair without a draft model is measured without drafts
by the peers, and with look-up by our fleet.

--vocab 151936 gives both models as many ids as Qwen's have, and --temperature 0.7 --top-p 0.8 --top-k 20 are the
settings that Qwen3 ships. The new ids are likely enough to matter and stand for no text, so such texts mean nothing.

Figures and ratios are medians of the rounds, ratios within a round. The exit status is 0 when no peer is faster than
the fleet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from loadtest.bench import add_choice_flags, bench_parser, report, run, sampling_of, show
from loadtest.client import BatchResult, asks_of, decoded_together, run_batch
from loadtest.fleet import DEMO, PAIRS, bench_fleet, named_pair, say
from loadtest.peers.inside.protocol import Job
from loadtest.peers.run import PEERS, PeerFigure, case_of, encoded_prompts, measure_peer
from loadtest.streams import COUNTED, Ask
from loadtest.trial import Trial
from loadtest.vocabulary import with_vocabulary
from paceline.checkpoints.families import is_eagle3
from paceline.verifier.config import DEFAULT_METHODS, IN_VERIFIER

FLEET, FLEET_IN_TURN = "paceline", "paceline in turn"
OUR_FLEETS = (FLEET, FLEET_IN_TURN)
# Figures of a case, one a round, by peer, mode, streams and draft length.
Rounds = Mapping[tuple[str, str, int, int | None], Sequence[PeerFigure]]


def main() -> None:
    """Parses the command line and runs the bench; exit status 1 when a peer is faster."""
    parser = bench_parser("peers", __doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="(default: all)")
    parser.add_argument("--pair", choices=PAIRS, default=DEMO, help="(default: the demo pair, its target widened)")
    parser.add_argument("--target", type=Path, help="checkpoint folder instead of the pair's target")
    parser.add_argument("--draft", type=Path, help="checkpoint folder instead of the pair's draft model")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32], help="plain decoding (default: 1 8 32)")
    parser.add_argument(
        "--draft-lengths",
        type=int,
        nargs="*",
        default=[3, 5, 7],
        help="with drafts at 1 stream, the first one at 8 too (default: 3 5 7)",
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (default: 128)")
    parser.add_argument("--passes", type=int, default=3, help="over the prompts, the median counts (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of everything, for machines whose speed drifts (default: 1)"
    )
    add_choice_flags(parser)
    # Through the clean-ups that stop a peer, or an installation, and its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures everything once a round, and prints the table; True when no peer is faster than the fleet."""
    named = named_pair(arguments.pair)
    target, draft = arguments.target or named["model"], arguments.draft or named["draft_model"]
    if draft is not None:
        pair = with_vocabulary({"model": target, "draft_model": draft}, arguments.vocab)
        target, draft = pair["model"], pair["draft_model"]
    elif arguments.vocab:
        raise SystemExit(f"--vocab needs a draft model, and the pair {arguments.pair} has none")
    arguments.draft = draft
    jobs = jobs_of(target, arguments)
    rounds: list[list[PeerFigure]] = []
    for _ in range(arguments.rounds):
        # Blocks the loop: nothing else is to run here, and a signal that ends the bench ends this at once.
        peers = [figure for name in tqdm(arguments.peers, desc="peers") for figure in measure_peer(name, jobs, say)]
        rounds.append([*peers, *await measure_ours(target, arguments)])
    by_case = cases_of(rounds)
    rows = [median_figure(case).row() for case in by_case.values()]
    show(
        {
            "peer": row["peer"],
            "mode": row["mode"],
            "streams": row["streams"],
            "gamma": row.get("draft_length"),
            "decode": row["decode_tokens_per_s"],
            "total": row["total_tokens_per_s"],
            "differ": num_different(case[0], rounds[0]),
            "version": row["version"],
            "error": row.get("error"),
        }
        for row, case in zip(rows, by_case.values(), strict=True)
    )
    trials = ratios(by_case)
    found = {at: round(trial.ratio, 3) for at, trial in trials.items()}
    show([{"ratio to the best peer at": found}])
    ok = bool(trials) and all(trial.meets(least=1.0) for trial in trials.values())
    return report("peers", model=target.name, **sampling_of(arguments), figures=rows, to_best_peer=found, ok=ok)


def jobs_of(target: Path, arguments: argparse.Namespace) -> list[Job]:
    """Jobs that each peer's processes measure: plain decoding, and each draft length."""
    # Heads are in a format of their own.
    has_model = arguments.draft is not None and not is_eagle3(arguments.draft)
    lengths, draft = (arguments.draft_lengths, arguments.draft) if has_model else ([], target)
    streams_by_length = {
        None: arguments.streams,
        **{length: [1] if at else [1, 8] for at, length in enumerate(lengths)},
    }
    cases = {length: [case_of(each) for each in streams] for length, streams in streams_by_length.items()}
    prompts = encoded_prompts(draft, max(case.num_prompts for each in cases.values() for case in each))
    return [
        Job(
            target=str(target),
            draft=str(draft),
            draft_length=length,
            prompts=prompts,
            max_new_tokens=arguments.max_tokens,
            passes=arguments.passes,
            cores=sorted(os.sched_getaffinity(0)),
            cases=each,
            **sampling_of(arguments),
        )
        for length, each in cases.items()
    ]


async def measure_ours(target: Path, arguments: argparse.Namespace) -> list[PeerFigure]:
    """Measures the whole fleet at the numbers of streams of the bench.

    As `paceline up` starts it, plain and speculating; and speculating with the drafter inside the verifier, where both
    models run on all cores in turn, as they do in every peer.
    """
    if arguments.draft is None:
        async with bench_fleet(model=target, drafter=False) as fleet:
            return await _figures(FLEET, fleet.gateway_url, ("plain", "draft"), arguments)
    inside = json.dumps({"method": DEFAULT_METHODS, "placement": IN_VERIFIER, "model": str(arguments.draft)})
    async with bench_fleet(model=target, draft_model=arguments.draft) as fleet:
        figures = await _figures(FLEET, fleet.gateway_url, ("plain", "draft"), arguments)
    async with bench_fleet(model=target, drafter=False, speculative_config=inside) as fleet:
        return figures + await _figures(FLEET_IN_TURN, fleet.gateway_url, ("draft",), arguments)


async def _figures(name: str, url: str, modes: Sequence[str], arguments: argparse.Namespace) -> list[PeerFigure]:
    figures: list[PeerFigure] = []
    for streams, mode in itertools.product(arguments.streams, modes):
        asks = [
            replace(each, speculation={"enabled": mode == "draft"}, more={**sampling_of(arguments), **COUNTED})
            for each in asks_of(case_of(streams).num_prompts, arguments.max_tokens)
        ]
        title = f"{name}, {mode}, {streams} streams"
        passes = [await _waves(url, asks, streams, title) for _ in range(arguments.passes + 1)]
        # The first pass fills the prefix cache and lets the controller meet the load.
        decode, total = zip(*map(_speeds, passes[1:]), strict=True)
        figures.append(
            PeerFigure(
                peer=name,
                precision="bfloat16",
                mode=mode,
                streams=streams,
                temperature=arguments.temperature,
                decode_tokens_per_s=statistics.median(decode),
                total_tokens_per_s=statistics.median(total),
                num_tokens=sum(wave.num_tokens for wave in passes[0]),
            )
        )
    return figures


async def _waves(url: str, asks: Sequence[Ask], streams: int, title: str) -> list[BatchResult]:
    starts = range(0, len(asks), streams)
    return [await run_batch(url, asks[start : start + streams], streams, title) for start in starts]


def _speeds(waves: Sequence[BatchResult]) -> tuple[float, float]:
    """Tokens/s while all streams decoded, and over all: as the peers' are counted."""
    tokens, seconds = map(sum, zip(*(decoded_together(wave.completions) for wave in waves), strict=True))
    return tokens / seconds, sum(wave.num_tokens for wave in waves) / sum(wave.seconds for wave in waves)


def cases_of(rounds: Sequence[Sequence[PeerFigure]]) -> Rounds:
    """Returns the figures of all rounds by their case."""
    by_case: dict[tuple[str, str, int, int | None], list[PeerFigure]] = {}
    for figure in itertools.chain.from_iterable(rounds):
        by_case.setdefault((figure.peer, figure.mode, figure.streams, figure.draft_length), []).append(figure)
    return by_case


def median_figure(case: Sequence[PeerFigure]) -> PeerFigure:
    """The first figure of a case with the median speeds of all rounds in which there is one."""
    measured = [each for each in case if not each.error]
    if not measured:
        return case[0]
    return replace(
        measured[0],
        decode_tokens_per_s=statistics.median(each.decode_tokens_per_s for each in measured),
        total_tokens_per_s=statistics.median(each.total_tokens_per_s for each in measured),
    )


def ratios(cases: Rounds) -> dict[str, Trial]:
    """The fleet over the best peer by the number of streams; peers have neither server nor client on the same cores.

    The fleet as served (with speculation on, by the better placement of the drafter) is compared with a peer's best at
    1 stream, and with its plain figure at more.
    """

    def best(peers: Sequence[str], streams: int, *modes: str) -> list[float]:
        """Speeds of the fastest case, round by round; none where there is none without an error."""
        fitting = [
            [each.decode_tokens_per_s for each in case]
            for (peer, mode, at, _), case in cases.items()
            if peer in peers and at == streams and mode in modes and not any(each.error for each in case)
        ]
        return max(fitting, key=statistics.median, default=[])

    trials: dict[str, Trial] = {}
    for streams in sorted({at for peer, _, at, _ in cases if peer in OUR_FLEETS}):
        mine, its = best(OUR_FLEETS, streams, "draft"), best(PEERS, streams, "plain", *["draft"] * (streams == 1))
        if mine and its:
            trials[str(streams)] = Trial.of(mine, its)
    return trials


def num_different(figure: PeerFigure, figures: Sequence[PeerFigure]) -> int | None:
    """Counts the texts that are not those of the same peer's plain run at 1 stream, of the prompts both had."""
    plain = [each for each in figures if (each.peer, each.mode, each.streams) == (figure.peer, "plain", 1)]
    if not plain or plain[0].error or figure.error or not figure.token_ids:
        return None
    pairs = zip(plain[0].token_ids, figure.token_ids, strict=False)
    return sum(list(theirs) != list(ours) for theirs, ours in pairs)
