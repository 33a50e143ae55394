"""What verifier and drafter compute beside their models, in microseconds a step: `make bench NAME=core`.

The schedulers that serve, the controller and the messages on the wire, by turns in one process; instead of models the
planner's law of guesses. All sessions decode, none ends. The drafter computes `LEVELS` levels of the trees between two
steps of the verifier, of each session a quarter of the nodes a level, and guesses two children of each. Medians.

The verifier's parts: `decode` the drafter's messages, `receive` them, decide whether to `wait`, `plan` the step,
`commit` what the target has chosen, `encode` the messages for the drafter. The drafter's: `apply` commits, once a step
of the verifier, and at every level choose the `frontier`, `grow` the trees and `push` new nodes. A level's sum has its
share of `apply`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from loadtest.bench import Table, bench_parser, report
from paceline.core.acceptance_rules import Verdict
from paceline.core.draft_policy import Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.messages import ToDrafter
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.params import METHODS
from paceline.core.planned_step import Part
from paceline.core.scheduler import Scheduler
from paceline.core.step_time import StepCost
from paceline.core.target_events import DraftsArrived, LinkChanged, TargetLimits
from paceline.core.tree import walk
from paceline.forest import Forest
from paceline.planning.drafter import LINK, SimulatedDrafter
from paceline.planning.events import Events
from paceline.planning.verifier import Request, SimulatedSession
from paceline.rpc.v1 import drafter_pb2
from paceline.service.process import collect_rarely, settle_heap
from paceline.simulated.guesses import RIGHT, STRIDE, DrawnGuesses, texts_of
from paceline.simulated.profile import DrafterFacts
from paceline.wire import (
    draft_request_from_pb,
    draft_request_to_pb,
    draft_response_from_pb,
    draft_response_to_pb,
    in_parts,
)

LOADS, SHAPES = (1, 8, 64, 256), (8, 16)
LEVELS, WIDTH = 4, 2
PROMPT_TOKENS, KV_TOKENS = 48, 2048
# Of a large model on GPUs: more rows cost next to nothing, so that drafting pays at every load.
STEP_S, ROW_S = 0.015, 1e-6
DRAFTER = "drafter:1"
# Most milliseconds of a verifier's step and of a drafter's level, by sessions.
VERIFIER_MS = {1: 0.3, 8: 0.5, 64: 1.0, 256: 2.5}
DRAFTER_MS = {1: 0.2, 8: 0.3, 64: 0.7, 256: 2.0}
VERIFIER_PARTS = ("decode", "receive", "wait", "plan", "commit", "encode")
LEVEL_PARTS = ("frontier", "grow", "push")


class Stopwatch:
    """Seconds of the thread's CPU by part, step by step: nothing here waits, and others may run beside it."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block."""
        started_s = time.thread_time()
        yield
        self._seconds[name].append(time.thread_time() - started_s)

    def median_us(self, name: str, skipped: int, each: int = 1) -> float:
        """Median of a part in microseconds, without the first ones; of `each` in a row their mean counts."""
        seconds = self._seconds[name][skipped:]
        means = [statistics.mean(seconds[start : start + each]) for start in range(0, len(seconds), each)]
        return round(1e6 * statistics.median(means), 1)


class Verifier:
    """A scheduler whose target always chooses `RIGHT`.

    Args:
        num_sessions: That decode.
        num_nodes: Most nodes of a session in a step.
        watch: Times its parts.
    """

    def __init__(self, num_sessions: int, num_nodes: int, watch: Stopwatch) -> None:
        self._watch = watch
        self.now_s = 0.0
        rows = num_sessions * (1 + max(num_nodes, PROMPT_TOKENS))
        cost = StepCost(rows=(1, rows), seconds=(STEP_S, STEP_S + ROW_S * rows))
        policy = Goodput(cost, max_nodes=num_nodes)
        # Known loads: nothing is tried for the sake of comparison.
        policy.resume(policy.learned() | {"compared": [*map(float, range(16))]})
        pool, forest = BlockPool(num_sessions * KV_TOKENS // BLOCK_SIZE), Forest(METHODS)
        self._scheduler: Scheduler[SimulatedSession] = Scheduler(
            pool=pool,
            scratch=SlotPool(first_block=0, num_blocks=1 + rows // BLOCK_SIZE),
            limits=TargetLimits(max_num_seqs=num_sessions, max_num_batched_tokens=rows, max_model_len=KV_TOKENS),
            policy=policy,
            tier=DrafterTier(STRIDE, forest),
        )
        self._scheduler.change_link(LinkChanged(address=DRAFTER, up=True), 0.0)
        calibration = forest.new_calibration()
        for number in range(num_sessions):
            asked = Request(number=number, at_s=0.0, num_prompt_tokens=PROMPT_TOKENS, num_output_tokens=KV_TOKENS)
            session = SimulatedSession(asked, DRAFTER, pool, forest, calibration, now_s=0.0, price=policy.price)
            self._scheduler.submit(session)

    def step(self, received: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Takes in a drafter's messages and runs a step; returns messages for it, and how many nodes were verified."""
        scheduler, part = self._scheduler, self._watch.part
        with part("decode"):
            decoded = [draft_response_from_pb(drafter_pb2.DraftResponse.FromString(each))[1] for each in received]
        with part("receive"):
            for drafts in decoded:
                scheduler.receive(DraftsArrived(address=DRAFTER, messages=drafts, arrived_s=self.now_s))
        with part("wait"):
            scheduler.mark_silent_drafters(self.now_s)
            scheduler.patience_s(self.now_s)
        with part("plan"):
            plan = scheduler.plan(self.now_s)
        scheduler.take_outcomes()
        self.now_s += STEP_S + ROW_S * plan.num_rows
        with part("commit"):
            judged = [(each, _judge(each)) for each in plan.parts if each.commits]
            scheduler.commit(judged, batch_size=plan.batch_size, now_s=self.now_s)
            scheduler.moves.clear()
            scheduler.end_step(plan, self.now_s)
            scheduler.take_report(plan)
        with part("encode"):
            messages = scheduler.tier.take()[0].get(DRAFTER, [])
            encoded = [draft_request_to_pb(each).SerializeToString() for each in in_parts(messages)]
        return encoded, sum(len(each.nodes) for each in plan.parts)


def _judge(part: Part[SimulatedSession]) -> Verdict:
    tokens = walk(part.root, part.nodes, lambda _: RIGHT)
    for token_id in tokens:
        part.session.ends_with(token_id)
    return Verdict(token_ids=tokens)


class Drafter:
    """A draft scheduler whose model guesses by a law.

    Args:
        num_sessions: That it drafts for.
        num_nodes: New nodes of a session that it computes between two steps of the verifier.
        watch: Times its parts.
    """

    def __init__(self, num_sessions: int, num_nodes: int, watch: Stopwatch) -> None:
        self._watch = watch
        facts = DrafterFacts(
            name="drafter",
            rows=(1, 2),
            seconds=(0.001, 0.001),
            kv_tokens=num_sessions * KV_TOKENS,
            max_sessions=num_sessions,
            max_rows=num_sessions * PROMPT_TOKENS,
            draft_width=WIDTH,
            draft_rows=num_sessions * num_nodes // LEVELS,
            draft_rows_per_session=num_nodes // LEVELS,
        )
        self._drafter = SimulatedDrafter(facts, texts_of(DrawnGuesses()), Events(0))

    def draft(self, received: Sequence[bytes], now_s: float) -> list[bytes]:
        """Takes in commits and computes some levels; returns messages for the verifier."""
        with self._watch.part("apply"):
            messages: list[ToDrafter] = []
            for each in received:
                messages += draft_request_from_pb(drafter_pb2.DraftRequest.FromString(each))[1]
            self._drafter.handle(messages, now_s)
        return [encoded for _ in range(LEVELS) for encoded in self._level(now_s)]

    def _level(self, now_s: float) -> list[bytes]:
        drafter, part = self._drafter, self._watch.part
        with part("frontier"):
            plan = drafter.scheduler.plan(now_s) if drafter.scheduler.has_work else None
        offers = [] if plan is None else drafter.guesses(plan)
        with part("grow"):
            drafter.scheduler.trees.grow(offers)
        with part("push"):
            drafts = drafter.drafts(()).get(LINK, ())
            return [draft_response_to_pb(each).SerializeToString() for each in in_parts(drafts)]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("core", __doc__)
    parser.add_argument("--steps", type=int, default=80, help="steps of the verifier that count (default 80)")
    parser.add_argument("--warm-up", type=int, default=30, help="steps before them (default 30)")
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS, help="sessions (default 1 8 64 256)")
    arguments = parser.parse_args()
    settle_heap()
    collect_rarely()
    table, rows = Table(), []
    for num_nodes in SHAPES:
        for num_sessions in arguments.loads:
            rows.append(measure(num_sessions, num_nodes, arguments))
            table.add(rows[-1])
    ok = all(row["met"] for row in rows)
    raise SystemExit(0 if report("core", ok=ok, rows=rows) else 1)


def measure(num_sessions: int, num_nodes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one load and one shape of trees."""
    watch = Stopwatch()
    verifier, drafter = Verifier(num_sessions, num_nodes, watch), Drafter(num_sessions, num_nodes, watch)
    received: list[bytes] = []
    verified = []
    for _ in range(arguments.warm_up + arguments.steps):
        sent, num_verified = verifier.step(received)
        received = drafter.draft(sent, verifier.now_s)
        verified.append(num_verified)
    in_verifier = {name: watch.median_us(name, arguments.warm_up) for name in VERIFIER_PARTS}
    in_level = {name: watch.median_us(name, arguments.warm_up * LEVELS, LEVELS) for name in LEVEL_PARTS}
    apply = watch.median_us("apply", arguments.warm_up)
    step_us, level_us = sum(in_verifier.values()), sum(in_level.values()) + apply / LEVELS
    met = step_us <= 1e3 * VERIFIER_MS.get(num_sessions, 1e9) and level_us <= 1e3 * DRAFTER_MS.get(num_sessions, 1e9)
    return {
        "sessions": num_sessions,
        "nodes": num_nodes,
        "verified": round(statistics.mean(verified[arguments.warm_up :]) / num_sessions, 1),
        "verifier": in_verifier | {"sum": round(step_us)},
        "drafter": {"apply": apply} | in_level | {"level": round(level_us)},
        "met": met,
    }


if __name__ == "__main__":
    main()
