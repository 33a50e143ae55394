"""Time of verifier and drafter beside their models, in microseconds a step: `make bench NAME=core`.

The engines that serve, on simulated devices, with the controller and the messages on the wire, by turns in one process.
Device time is left out. All sessions decode, none ends, and all steps draft. The drafter
computes `LEVELS` levels of the trees between two steps of the verifier, of each session a quarter of the nodes a level,
and guesses two children of each. A step has 512 rows at most. Medians.

The verifier's parts: `decode` the drafter's messages, `receive` them, decide whether to `wait`, `plan` the step,
`commit` what the target has chosen, `encode` the messages for the drafter. The drafter's: `apply` commits, once a step
of the verifier, and at every level choose the `frontier`, `grow` the trees and `push` new nodes. A level's sum has its
share of `apply`. `rows`, beside the sums: packing the rows of a step, and choosing or ranking tokens from their logits,
which grows with --vocab (4,096 ids) and with what requests ask for. With many ids, name the loads whose logits there is
memory for: at 151,936 ids they are 0.6 MB a row, and as much again for a drafter's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest.bench import Table, add_choice_flags, bench_parser, report, sampling_of
from paceline.core.draft_policy import Goodput
from paceline.core.messages import GenerateRequest, ModelIdentity, ToDrafter
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import DraftsArrived, LinkChanged, Submit, TargetLimits
from paceline.engine.draft_scheduler import VerifierMessages
from paceline.engine.loop import run_sync
from paceline.engine.target import TargetEngine
from paceline.rpc.v1 import drafter_pb2
from paceline.service.process import GARBAGE_OF_STEPS, settle_heap
from paceline.simulated.device import Pace, SimulatedDraft, SimulatedTarget
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.model import draft_engine
from paceline.simulated.profile import DeviceFacts, DrafterFacts
from paceline.simulated.text import Ints
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
# Times of a large model on GPUs: more rows cost next to nothing, so that drafting pays at every load.
STEP_S, ROW_S = 0.015, 1e-6
DRAFTER, LINK = "drafter:1", 1
# Vocabulary size of the demo pair.
VOCAB_SIZE = 4096
# Most milliseconds of a verifier's step and of a drafter's level, by sessions.
VERIFIER_MS = {1: 0.3, 8: 0.5, 64: 1.0, 256: 2.5}
DRAFTER_MS = {1: 0.2, 8: 0.3, 64: 0.7, 256: 2.0}
VERIFIER_PARTS = ("decode", "receive", "wait", "plan", "commit", "encode")
LEVEL_PARTS = ("frontier", "grow", "push")


class Stopwatch:
    """Seconds of the thread's CPU by part, step by step: nothing here waits, and others may run beside it."""

    def __init__(self) -> None:
        self._now: dict[str, float] = defaultdict(float)
        self._steps: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times a block, which counts for a part of the step under way."""
        started_s = time.thread_time()
        yield
        self._now[name] += time.thread_time() - started_s

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Times all calls of a method from now on."""
        call = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*arguments, **named)

        setattr(owner, method, timed)

    def end_step(self, names: Sequence[str]) -> None:
        """These parts of a step are over."""
        for name in names:
            self._steps[name].append(self._now.pop(name, 0.0))

    def median_us(self, name: str, skipped: int, each: int = 1) -> float:
        """Median of a part in microseconds, without the first ones; of `each` in a row their mean counts."""
        seconds = self._steps[name][skipped:]
        means = [statistics.mean(seconds[start : start + each]) for start in range(0, len(seconds), each)]
        return round(1e6 * statistics.median(means), 1)


@dataclass(frozen=True, slots=True)
class Models:
    """A pair of simulated models, and what both call themselves."""

    words: Ints
    identity: ModelIdentity

    @classmethod
    def of(cls, vocab_size: int) -> Models:
        """A pair whose texts are of all its ids."""
        identity = ModelIdentity(
            name="simulated", vocab_hash="", vocab_size=vocab_size, context_len=PROMPT_TOKENS + KV_TOKENS
        )
        return cls(np.arange(vocab_size), identity)


class Clock:
    """Time that passes while devices compute, and at no other moment."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now_s(self) -> float:
        """The time."""
        return self.seconds

    def sleep(self, seconds: float) -> None:
        """A device computes."""
        self.seconds += seconds


class Verifier:
    """A verifier's engine on a simulated device.

    Args:
        models: Both of them.
        sampling: How requests choose.
        num_sessions: Sessions that decode.
        num_nodes: Most nodes of a session in a step.
        watch: Times its parts.
    """

    def __init__(
        self, models: Models, sampling: Mapping[str, Any], num_sessions: int, num_nodes: int, watch: Stopwatch
    ) -> None:
        self._watch, self._clock = watch, Clock()
        rows = num_sessions * (1 + max(num_nodes, PROMPT_TOKENS))
        facts = DeviceFacts(name="target", rows=(1, rows), seconds=(STEP_S, STEP_S + ROW_S * rows))
        policy = Goodput(facts.cost, max_nodes=num_nodes)
        # Known loads: nothing is tried for the sake of comparison.
        policy.mode.resume([value for at in range(10) for value in (float(at), 1.0, 0.0, 2.0)])
        pace = Pace(facts, clock=self._clock.now_s, sleep=self._clock.sleep)
        decoder = SimulatedTarget(models.words, pace, models.identity.vocab_size)
        self.engine = TargetEngine(
            decoder=decoder,
            identity=models.identity,
            num_blocks=num_sessions * KV_TOKENS // BLOCK_SIZE,
            limits=TargetLimits(max_num_seqs=num_sessions, max_num_batched_tokens=rows),
            policy=policy,
            clock=self._clock.now_s,
        )
        self.engine.handle(LinkChanged(address=DRAFTER, up=True))
        for number in range(1, 1 + num_sessions):
            request = GenerateRequest(
                session_id=str(number),
                epoch=1,
                prompt_token_ids=(number,) * PROMPT_TOKENS,
                sampling=SamplingParams(max_tokens=KV_TOKENS, ignore_eos=True, **sampling),
                speculation=SpeculationParams(),
            )
            self.engine.handle(Submit(request=request, number=number, drafter_address=DRAFTER))
        scheduler = self.engine.scheduler
        for method, name in (("plan", "plan"), ("commit", "commit"), ("end_step", "end"), ("take_report", "end")):
            watch.watch(scheduler, method, name)
        watch.watch(self.engine, "_run", "run")
        watch.watch(decoder, "launch", "device")
        watch.watch(scheduler.tier, "take", "encode")

    def step(self, received: Sequence[bytes]) -> tuple[list[bytes], int]:
        """Handles a drafter's messages and runs a step; returns messages for it, and how many nodes were verified."""
        engine, part = self.engine, self._watch.part
        with part("decode"):
            decoded = [draft_response_from_pb(drafter_pb2.DraftResponse.FromString(each))[1] for each in received]
        with part("receive"):
            for drafts in decoded:
                engine.handle(DraftsArrived(address=DRAFTER, messages=drafts, arrived_s=self._clock.seconds))
        with part("wait"):
            engine.patience_s()
        output = run_sync(engine.step())
        with part("encode"):
            messages = output.to_drafters.get(DRAFTER, [])
            encoded = [draft_request_to_pb(each).SerializeToString() for each in in_parts(messages)]
        self._watch.end_step((*VERIFIER_PARTS, "end", "run", "device"))
        return encoded, sum(output.report.gammas)


class Drafter:
    """A drafter's engine on a simulated device.

    Args:
        models: Both of them.
        num_sessions: Sessions that it drafts for.
        num_nodes: New nodes of a session that it computes between two steps of the verifier.
        watch: Times its parts.
    """

    def __init__(self, models: Models, num_sessions: int, num_nodes: int, watch: Stopwatch) -> None:
        self._watch, clock = watch, Clock()
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
        pace = Pace(facts, clock=clock.now_s, sleep=clock.sleep)
        draft = SimulatedDraft(models.words, pace, models.identity.vocab_size, GuessLaw())
        num_blocks = facts.kv_tokens // BLOCK_SIZE
        self.engine = draft_engine(draft, facts, pace, models.identity, num_blocks=num_blocks)
        scheduler = self.engine.scheduler
        for method, name in (("plan", "frontier"), ("end_step", "push"), ("take", "push")):
            watch.watch(scheduler, method, name)
        watch.watch(scheduler.trees.forest, "grow", "grow")
        watch.watch(self.engine, "_run", "draft_run")
        watch.watch(self.engine._decoder, "launch", "draft_device")  # noqa: SLF001 - its own makes it

    def draft(self, received: Sequence[bytes]) -> list[bytes]:
        """Follows commits and computes some levels; returns messages for the verifier."""
        with self._watch.part("apply"):
            messages: list[ToDrafter] = []
            for each in received:
                messages += draft_request_from_pb(drafter_pb2.DraftRequest.FromString(each))[1]
            self.engine.handle(VerifierMessages(link=LINK, messages=messages))
        self._watch.end_step(["apply"])
        return [encoded for _ in range(LEVELS) for encoded in self._level()]

    def _level(self) -> list[bytes]:
        output = run_sync(self.engine.step())
        with self._watch.part("push"):
            drafts = output.to_verifiers.get(LINK, ())
            encoded = [draft_response_to_pb(each).SerializeToString() for each in in_parts(drafts)]
        self._watch.end_step((*LEVEL_PARTS, "draft_run", "draft_device"))
        return encoded


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("core", __doc__)
    parser.add_argument("--steps", type=int, default=80, help="steps of the verifier that count (default 80)")
    parser.add_argument("--warm-up", type=int, default=30, help="steps before them (default 30)")
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS, help="sessions (default 1 8 64 256)")
    add_choice_flags(parser)
    arguments = parser.parse_args()
    models = Models.of(arguments.vocab or VOCAB_SIZE)
    settle_heap(GARBAGE_OF_STEPS)
    table, rows = Table(), []
    for num_nodes in SHAPES:
        for num_sessions in arguments.loads:
            rows.append(measure(models, num_sessions, num_nodes, arguments))
            table.add(rows[-1])
    ok = all(row["met"] for row in rows)
    settings = {"vocab": models.identity.vocab_size, **sampling_of(arguments)}
    raise SystemExit(0 if report("core", **settings, rows=rows, ok=ok) else 1)


def measure(models: Models, num_sessions: int, num_nodes: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of one load and one shape of trees."""
    watch = Stopwatch()
    verifier = Verifier(models, sampling_of(arguments), num_sessions, num_nodes, watch)
    drafter = Drafter(models, num_sessions, num_nodes, watch)
    received: list[bytes] = []
    verified = []
    for _ in range(arguments.warm_up + arguments.steps):
        sent, num_verified = verifier.step(received)
        received = drafter.draft(sent)
        verified.append(num_verified)
    parts = (*VERIFIER_PARTS, "end", "run", "device", "apply")
    in_step = {name: watch.median_us(name, arguments.warm_up) for name in parts}
    in_step["rows"] = round(in_step["run"] - in_step["device"] - in_step["commit"], 1)
    in_step["commit"] = round(in_step["commit"] + in_step["end"], 1)
    level_parts = (*LEVEL_PARTS, "draft_run", "draft_device")
    in_level = {name: watch.median_us(name, arguments.warm_up * LEVELS, LEVELS) for name in level_parts}
    in_level["rows"] = round(in_level["draft_run"] - in_level["draft_device"] - in_level["grow"], 1)
    in_verifier = {name: in_step[name] for name in VERIFIER_PARTS}
    apply = in_step["apply"]
    step_us, level_us = sum(in_verifier.values()), sum(in_level[name] for name in LEVEL_PARTS) + apply / LEVELS
    met = step_us <= 1e3 * VERIFIER_MS.get(num_sessions, 1e9) and level_us <= 1e3 * DRAFTER_MS.get(num_sessions, 1e9)
    return {
        "sessions": num_sessions,
        "nodes": num_nodes,
        "verified": round(statistics.mean(verified[arguments.warm_up :]) / num_sessions, 1),
        "verifier": in_verifier | {"sum": round(step_us), "rows": in_step["rows"]},
        "drafter": {"apply": apply}
        | {name: in_level[name] for name in LEVEL_PARTS}
        | {"level": round(level_us), "rows": in_level["rows"]},
        "met": met,
    }


if __name__ == "__main__":
    main()
