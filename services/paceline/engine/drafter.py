"""The drafter's engine: a small language model grows the trees of many sessions in shared batches.

It owns the draft model, which it has computed where the device is (`engine.loop`). The plan of a step is the draft
scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from paceline.core.errors import RemoteProtocolError
from paceline.core.features import Features
from paceline.core.messages import CommittedStates, Drafts, ModelIdentity, OpenSession, ToVerifier
from paceline.core.pages import BlockPool, SlotPool, draft_scratch_blocks
from paceline.core.params import SamplingParams
from paceline.core.processors import UnusableLogitsError
from paceline.core.target_events import StepReport
from paceline.engine.draft_plan import DraftPlan, Starts
from paceline.engine.draft_scheduler import DraftEvent, DraftLimits, DraftScheduler, VerifierLeft, VerifierMessages
from paceline.engine.draft_session import DraftSession
from paceline.engine.loop import Compute, inline, run_sync
from paceline.engine.model import Burst, DraftModel
from paceline.engine.packing import BatchBuilder, Nodes, PrefixRows
from paceline.engine.pending import HostPending, Longs, Ranks, choices_of
from paceline.engine.sampler import Logits
from paceline.forest import NONE, Floats, Ints, warm_up

logger = logging.getLogger(__name__)

# Greedy or not, by logits alone or not.
FIRST_SAMPLINGS = (
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=0.0, presence_penalty=0.1),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, presence_penalty=0.1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """Messages to the verifiers after a step.

    Attributes:
        device_s: Time of the device by verifiers' streams, each by its share of the rows.
    """

    to_verifiers: dict[int, list[ToVerifier]]
    broken_links: dict[int, RemoteProtocolError]
    report: StepReport
    device_s: dict[int, float] = field(default_factory=dict)


class DraftEngine:
    """Runs the draft scheduler's steps on a small model; see the module docstring.

    Args:
        decoder: The draft model.
        identity: The drafter's own name.
        num_blocks: Pages of committed KV; a quarter as many are added for tree nodes.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        decoder: DraftModel,
        identity: ModelIdentity,
        num_blocks: int,
        limits: DraftLimits,
        clock: Callable[[], float],
    ) -> None:
        scratch_blocks = draft_scratch_blocks(num_blocks)
        self.pool = BlockPool(num_blocks)
        self._decoder = decoder
        self._limits = limits
        self._clock = clock
        self._cache = decoder.new_cache(num_blocks + scratch_blocks)
        scratch = SlotPool(first_block=num_blocks, num_blocks=scratch_blocks)
        self.scheduler = DraftScheduler(
            pool=self.pool, scratch=scratch, limits=limits, identity=identity, feature_width=decoder.feature_width
        )
        warm_up(self.scheduler.trees.forest)
        self._num_reported = 0
        self._device_s: dict[int, float] = {}

    @property
    def cache(self) -> Any:
        """The model's `new_cache` that steps write to."""
        return self._cache

    @property
    def num_sessions(self) -> int:
        return self.scheduler.num_sessions

    def handle(self, event: DraftEvent) -> None:
        self.scheduler.handle(event, self._clock())

    def warm_up(self) -> None:
        """Grows a few trees in a step or two, so that the first session finds everything compiled."""
        width = self._decoder.feature_width
        for number, sampling in enumerate(FIRST_SAMPLINGS, start=1):
            opened = OpenSession(
                session_id=str(number),
                epoch=0,
                number=number,
                token_ids=(0, 0),
                prompt_len=2,
                sampling=sampling,
                price=0.0,
                room=8,
            )
            # For a head, a feature of zeros.
            state = CommittedStates(number=number, start=0, width=width, values=bytes(2 * width))
            self.handle(VerifierMessages(link=0, messages=[opened, state] if width else [opened]))
        while self.has_work():
            run_sync(self.step())
        self.handle(VerifierLeft(link=0))

    def has_work(self) -> bool:
        """True while there is something to compute, to send or to report."""
        return self.scheduler.has_work or self.num_sessions != self._num_reported

    def patience_s(self) -> float:
        """A drafter never waits."""
        return 0.0

    async def step(self, compute: Compute = inline, tell: Callable[[DraftOutput], None] | None = None) -> DraftOutput:
        """Catches up with commits, expands the best nodes of all sessions, and collects the new nodes."""
        del tell
        started_s = self._clock()
        report = StepReport(levels={"paceline:drafter_lag_tokens": self.scheduler.lag_tokens})
        plan = self.scheduler.plan(started_s)
        if plan.num_rows:
            await compute(self._timed, plan)
        self.scheduler.end_step(plan, self._clock())
        report.num_rows, report.num_levels = plan.num_rows, plan.num_levels
        return self._output(report, started_s)

    def _timed(self, plan: DraftPlan) -> None:
        """Runs a plan where the device is; its time is that of the verifiers whose rows it computes."""
        shares, started_s = plan.shares(), self._clock()
        self._run(plan)
        seconds = self._clock() - started_s
        self._device_s = {link: share * seconds for link, share in shares.items()}

    def _run(self, plan: DraftPlan) -> None:
        # Committed nodes go to their places before anything else is written to their slots.
        self._cache.apply_moves(self.scheduler.moves)
        builder, starts, first = BatchBuilder(), plan.starts, list[int]()
        if plan.catching_up:
            prefixes = [
                PrefixRows(each.session.pages, each.start, each.stop, each.expands) for each in plan.catching_up
            ]
            features = [each.session.prefix_features(each.start, each.stop) for each in plan.catching_up]
            known = [each for each in features if each is not None]
            roots = builder.add_prefixes(prefixes, np.concatenate(known) if known else None)
            first = [row for row, part in zip(roots, plan.catching_up, strict=True) if part.expands]
        rows = np.array([*first, *self._add_nodes(builder, plan.growing)], np.int64)
        by_logits = starts.by_logits
        ranked, kv = starts.only(by_logits), np.ascontiguousarray(plan.kv[:, by_logits])
        others, burst = starts.only(~by_logits), Burst(_ranks_of(ranked, rows[by_logits]), kv, self._limits.width)
        try:
            drafted = self._decoder.draft(builder.build(), self._cache, burst)
            logits = drafted.pending.logits(rows[~by_logits].tolist()) if len(others) else None
        except MemoryError as error:
            size = {"rows": plan.num_rows}
            logger.warning("a draft step does not fit the device's memory", extra=size, exc_info=error)
            self.scheduler.abandon(plan)
            return
        lost = self._grow_ranked(ranked, drafted.token_ids, drafted.confidences, kv)
        if logits is not None:
            lost |= self._grow_others(others, logits)
        for session in lost:
            logger.warning("the draft model gave nothing to choose from; the session goes on without drafts")
            self.scheduler.give_up(session)
            session.given_up = True

    def _add_nodes(self, builder: BatchBuilder, growing: Starts) -> range:
        """Adds the rows of nodes; returns the places of their logits."""
        if not len(growing):
            return range(0)
        pages = [session.pages for session in growing.sessions]
        first = np.array([session.first_position for session in growing.sessions], np.int64)[growing.each]
        nodes = Nodes(
            growing.each, growing.path[growing.ends - 1], growing.lengths - 1 - first, growing.ends, growing.kv
        )
        features: Features | None = None
        if self._decoder.feature_width:
            # Beside their tokens, rows of nodes take the states of their parents, which have been expanded.
            roots = np.array([each.slot(len(each.tokens) - 1) for each in pages], np.int64)[growing.each]
            parents = np.where(growing.depths > 1, growing.kv[growing.ends - 2], roots)
            features = self._cache.features(parents.tolist())
        return builder.add_columns(pages, nodes, features)

    def _grow_others(self, starts: Starts, rows: Logits) -> set[DraftSession]:
        """Hangs guesses of sessions whose requests change rows, or which draw; returns those with unusable logits."""
        for (session, _, path), row in zip(starts, rows, strict=True):
            session.change(row, path)
        chains = starts.of(attrgetter("chain"))
        ranked, width = starts.only(~chains), self._limits.width
        guesses = HostPending(rows).rank(*_ranks_of(ranked, np.flatnonzero(~chains)))
        token_ids: Ints = np.ascontiguousarray(guesses.token_ids[None, :, :width])
        confidences: Floats = np.ascontiguousarray(guesses.confidences[None, :, :width])
        lost = self._grow_ranked(ranked, token_ids, confidences, np.empty((0, len(ranked)), np.int32))
        return lost | self._grow_drawn(starts.only(chains), rows[chains])

    def _grow_drawn(self, starts: Starts, rows: Logits) -> set[DraftSession]:
        """Hangs the one guess of a chain below each node; returns sessions whose logits are unusable."""
        trees, drawn, lost = self.scheduler.trees, list[tuple[DraftSession, int, int]](), set[DraftSession]()
        for (session, slot, path), row in zip(starts, rows, strict=True):
            token_id = NONE
            if trees.wants_guesses(session, slot):
                try:
                    token_id = session.draw(path, row, trees.node_id(session, slot))
                except UnusableLogitsError:
                    lost.add(session)
            drawn.append((session, slot, token_id))
        trees.grow_chains([each for each in drawn if each[0] not in lost])
        return lost

    def _grow_ranked(self, starts: Starts, token_ids: Ints, confidences: Floats, kv: Ints) -> set[DraftSession]:
        """Hangs levels of the best guesses below each node; returns sessions whose logits are unusable."""
        if not len(starts):
            return set()
        lost = {starts.sessions[each] for each in starts.each[token_ids[0, :, 0] < 0].tolist()}
        if lost:
            # Nothing is hung below the other nodes of one that is lost, either.
            token_ids[:, starts.of(lost.__contains__)] = NONE
        self.scheduler.trees.grow_levels(starts.calls, token_ids, confidences, kv)
        return lost

    def _output(self, report: StepReport, started_s: float) -> DraftOutput:
        report.seconds = self._clock() - started_s
        report.num_running = self._num_reported = self.num_sessions
        report.levels["paceline:drafter_sessions"] = report.num_running
        report.count_pages(self.pool)
        outgoing, broken = self.scheduler.take()
        sent = [message for messages in outgoing.values() for message in messages]
        num_nodes = sum(message.num_nodes for message in sent if isinstance(message, Drafts))
        report.count("paceline:drafter_nodes_sent", by=num_nodes)
        device_s, self._device_s = self._device_s, {}
        return DraftOutput(to_verifiers=outgoing, broken_links=broken, report=report, device_s=device_s)


def _ranks_of(starts: Starts, rows: Longs) -> Ranks:
    """Args: `rows`: int64 `[starts]`, of their logits."""
    choices = choices_of([session.choice for session in starts.sessions])[starts.each]
    return Ranks(rows=rows, positions=starts.lengths, choices=choices)
