"""Peers side by side on the demo pair: `make bench NAME=peers`.

OpenVINO GenAI, llama.cpp, vLLM and transformers decode the same prompts greedily, plain and with the draft model as
their own draft model, on the same cores in bf16; then our engine in one process as they are, and our fleet over HTTP:
as `paceline up` starts it, and with the drafter inside the verifier, where both take turns as theirs do. Each peer is
set up in the user's cache folder the first time (minutes; llama.cpp is compiled), and one that cannot be is left out
with its reason. The last line is one JSON object; the exit status is 0 when no peer is faster than the fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.flags import bench_parser
from loadtest.fleet import machine
from loadtest.peers.ours import measure_ours, median_figures, median_verdict, verdict
from loadtest.peers.run import OUR_ENGINE, PEERS, PeerBench, PeerFigure, measure_peers
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, widened_demo_target
from paceline.verifier.config import DEFAULT_DRAFT_TOKENS

HEADINGS = f"{'peer':16} {'mode':7} {'streams':>7} {'gamma':>5} {'decode/s':>9} {'total/s':>9} {'differ':>7}"


def main() -> None:
    """Parses the command line and runs the bench; exit status 1 when a peer is faster."""
    arguments = _parser().parse_args()
    # Through the clean-ups that stop a peer, or an installation, and its children.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lengths = {1: arguments.draft_lengths}
    if arguments.batch_draft_length:
        lengths[8] = [arguments.batch_draft_length]
    target = arguments.target or widened_demo_target(os.environ, lambda line: print(line, file=sys.stderr))
    prompts = encoded_prompts(arguments.draft, max(arguments.least_prompts, *arguments.streams, *lengths))
    bench = PeerBench(
        target=target,
        draft=arguments.draft,
        prompts=prompts,
        max_new_tokens=arguments.max_tokens,
        plain=arguments.streams,
        drafted=lengths,
        least_prompts=arguments.least_prompts,
        passes=arguments.passes,
    )
    rounds = [_measure(arguments.peers, bench) for _ in range(arguments.rounds)]
    found = median_verdict([verdict(each.ours, each.engine, each.peers) for each in rounds])
    everything = median_figures([[*each.peers, *each.engine, *each.ours] for each in rounds])
    print_table(everything)
    for streams, ratio in found["to_best_peer"].items():
        against = "the best peer with its draft model" if streams == "1" else "the best peer's plain decoding"
        print(f"our fleet, speculating, over {against}, {streams} streams: {ratio}")
    for name, how in (("engine_to_best_peer", "both plain"), ("speculating_engine_to_best_peer", "ours speculating")):
        for streams, ratio in found[name].items():
            print(f"our engine alone over the best peer's, {how}, {streams} streams: {ratio}")
    mean_prompt = sum(map(len, prompts)) / len(prompts)
    print(
        f"decode/s: tokens/s while all streams decoded; total/s: prefill and stragglers counted; differ: texts that "
        f"are not those of its own plain run at 1 stream\n{target.name}, drafter {arguments.draft.name}, greedy, "
        f"prompts of {mean_prompt:.0f} tokens, {arguments.max_tokens} new, median of {arguments.passes}; "
        f"{arguments.rounds} rounds, of which figures and ratios are medians; {machine()}"
    )
    rows = [figure.row() for figure in everything]
    print(json.dumps({"bench": "peers", "machine": machine(), "model": target.name, "figures": rows, **found}))
    raise SystemExit(0 if found["ok"] else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """Everything measured once, one after the other."""

    peers: Sequence[PeerFigure]
    engine: Sequence[PeerFigure]
    ours: Sequence[PeerFigure]


def _measure(names: Sequence[str], bench: PeerBench) -> _Round:
    drafted = {streams: [DEFAULT_DRAFT_TOKENS] for streams in bench.plain}
    return _Round(
        peers=measure_peers(names, bench),
        engine=measure_peers([OUR_ENGINE], replace(bench, drafted=drafted)),
        ours=measure_ours(bench),
    )


def encoded_prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Returns unseen prompts as token ids of the checkpoint's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [list(tokenizer.encode(prompt).ids) for prompt in unseen_prompts(count)]


def print_table(figures: Sequence[PeerFigure]) -> None:
    """Prints a line per figure, under a line per peer that says what it is."""
    print(HEADINGS)
    told: set[str] = set()
    for figure in figures:
        if figure.version and figure.peer not in told:
            told.add(figure.peer)
            print(f"{figure.peer} {figure.version}, {figure.precision}")
        gamma = "-" if figure.draft_length is None else str(figure.draft_length)
        start = f"{figure.peer:16} {figure.mode:7} {figure.streams or '-':>7} {gamma:>5}"
        if figure.error:
            print(f"{start} {figure.error}")
        else:
            differ = num_different(figure, figures)
            print(
                f"{start} {figure.decode_tokens_per_s:9.1f} {figure.total_tokens_per_s:9.1f} "
                f"{'-' if differ is None else differ:>7}"
            )


def num_different(figure: PeerFigure, figures: Sequence[PeerFigure]) -> int | None:
    """Counts the texts that are not those of the same peer's plain run at 1 stream, of the prompts both had."""
    plain = [each for each in figures if (each.peer, each.mode, each.streams) == (figure.peer, "plain", 1)]
    if not plain or plain[0].error:
        return None
    pairs = zip(plain[0].token_ids, figure.token_ids, strict=False)
    return sum(list(theirs) != list(ours) for theirs, ours in pairs)


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("peers", __doc__)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="(default: all)")
    parser.add_argument("--target", type=Path, help="checkpoint folder (default: the demo target widened to 98 M)")
    parser.add_argument(
        "--draft", type=Path, default=DEMO_DRAFTER, help="checkpoint folder (default: the demo drafter)"
    )
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32], help="plain decoding (default: 1 8 32)")
    parser.add_argument(
        "--draft-lengths", type=int, nargs="*", default=[3, 5, 7], help="with drafts at 1 stream (default: 3 5 7)"
    )
    parser.add_argument(
        "--batch-draft-length", type=int, default=3, help="with drafts at 8 streams, 0 for none (default: 3)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (default: 128)")
    parser.add_argument("--least-prompts", type=int, default=8, help="prompts of a case, at least (default: 8)")
    parser.add_argument("--passes", type=int, default=3, help="over the prompts, the median counts (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of everything, for machines whose speed drifts (default: 1)"
    )
    return parser
