"""The drafter's engine: a small language model grows the trees of many sessions in shared batches.

It owns the draft model, which it has computed where the device is (`engine.loop`). What a step computes is the draft
scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.core.errors import RemoteProtocolError
from paceline.core.features import Features
from paceline.core.messages import CommittedStates, Drafts, ModelIdentity, OpenSession, ToVerifier
from paceline.core.pages import BlockPool, SlotPool, draft_scratch_blocks
from paceline.core.params import SamplingParams
from paceline.core.processors import UnusableLogitsError
from paceline.engine.draft_plan import DraftPlan, Expansion
from paceline.engine.draft_scheduler import DraftEvent, DraftLimits, DraftScheduler, VerifierLeft, VerifierMessages
from paceline.engine.draft_session import DraftSession, Offer
from paceline.engine.loop import Compute, finished, here
from paceline.engine.model import Burst, DraftModel
from paceline.engine.packing import BatchBuilder, PrefixRows, TreeRow
from paceline.engine.pending import HostPending, Ranks, choices_of
from paceline.engine.sampler import Logits
from paceline.forest import NONE, ROOT, Calls, Floats, Ints, rows_of, warm_up

logger = logging.getLogger(__name__)

# Greedy or not, by logits alone or not.
FIRST_SAMPLINGS = (
    SamplingParams(max_tokens=8, temperature=0.0),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=8, temperature=0.0, presence_penalty=0.1),
    SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, presence_penalty=0.1),
)


@dataclass(slots=True)
class DraftReport:
    """What one step did, for metrics."""

    seconds: float = 0.0
    num_rows: int = 0
    num_levels: int = 1
    num_nodes: int = 0
    num_sessions: int = 0
    lag_tokens: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    """What goes to the verifiers after a step."""

    to_verifiers: dict[int, list[ToVerifier]]
    broken_links: dict[int, RemoteProtocolError]
    report: DraftReport


class DraftEngine:
    """Runs the draft scheduler's steps on a small model; see the module docstring.

    Args:
        decoder: The draft model.
        identity: What it calls itself.
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

    @property
    def cache(self) -> Any:
        """What steps write to, of the model's `new_cache`."""
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
            finished(self.step())
        self.handle(VerifierLeft(link=0))

    def has_work(self) -> bool:
        """True while there is something to compute, to send or to report."""
        return self.scheduler.has_work or self.num_sessions != self._num_reported

    def patience_s(self) -> float:
        """A drafter never waits."""
        return 0.0

    async def step(self, compute: Compute = here, tell: Callable[[DraftOutput], None] | None = None) -> DraftOutput:
        """Catches up with commits, expands the best nodes of all sessions, and collects the new nodes."""
        del tell
        started_s = self._clock()
        report = DraftReport(lag_tokens=self.scheduler.lag_tokens)
        plan = self.scheduler.plan(started_s)
        if plan.num_rows:
            await compute(self._run, plan)
        self.scheduler.end_step(plan, self._clock())
        report.num_rows, report.num_levels = plan.num_rows, plan.num_levels
        return self._output(report, started_s)

    def _run(self, plan: DraftPlan) -> None:
        # Committed nodes go to their places before anything else is written to their slots.
        self._cache.apply_moves(self.scheduler.moves)
        builder, computed, growing = BatchBuilder(), list[_Computed](), list(plan.growing)
        if plan.catching_up:
            prefixes = [
                PrefixRows(each.session.pages, each.start, each.stop, each.expands) for each in plan.catching_up
            ]
            features = [each.session.prefix_features(each.start, each.stop) for each in plan.catching_up]
            known = [each for each in features if each is not None]
            roots = builder.add_prefixes(prefixes, np.concatenate(known) if known else None)
            read = zip(plan.catching_up, roots, strict=True)
            computed += [_Computed(part.session, ROOT, (), row) for part, row in read if part.expands]
        if growing:
            rows = builder.add_nodes([_row_of(each) for each in growing], self._features_of(growing))
            grown = zip(growing, rows, strict=True)
            computed += [_Computed(each.session, each.slot, each.path, row) for each, row in grown]
        places = [place for place, each in enumerate(computed) if each.session.by_logits]
        ranked, kv = [computed[place] for place in places], np.ascontiguousarray(plan.kv[:, places])
        burst = Burst(_ranks_of(ranked), kv, self._limits.width)
        others = [each for each in computed if not each.session.by_logits]
        try:
            drafted = self._decoder.draft(builder.build(), self._cache, burst)
            logits = drafted.pending.logits([each.row for each in others]) if others else None
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

    def _features_of(self, growing: Sequence[Expansion]) -> Features | None:
        """What the rows of nodes take beside their tokens: the states of their parents [nodes, width]."""
        if not self._decoder.feature_width:
            return None
        states: Features = self._cache.features([_parent_slot(each) for each in growing])
        return states

    def _grow_others(self, computed: Sequence[_Computed], rows: Logits) -> set[DraftSession]:
        """Hangs guesses of sessions whose requests change rows, or which draw; returns those with unusable logits."""
        for each, row in zip(computed, rows, strict=True):
            each.session.change(row, each.path)
        changed = [each._replace(row=row) for row, each in enumerate(computed)]
        ranked = [each for each in changed if not each.session.chain]
        guesses, width = HostPending(rows).rank(*_ranks_of(ranked)), self._limits.width
        token_ids: Ints = np.ascontiguousarray(guesses.token_ids[None, :, :width])
        confidences: Floats = np.ascontiguousarray(guesses.confidences[None, :, :width])
        lost = self._grow_ranked(ranked, token_ids, confidences, np.empty((0, len(ranked)), np.int32))
        return lost | self._grow_drawn([each for each in changed if each.session.chain], rows)

    def _grow_drawn(self, computed: Sequence[_Computed], rows: Logits) -> set[DraftSession]:
        """Hangs the one guess of a chain below each node; returns sessions whose logits are unusable."""
        trees, offers, lost = self.scheduler.trees, list[Offer](), set[DraftSession]()
        for session, slot, path, row in computed:
            if not trees.wants_guesses(session, slot):
                offers.append(Offer(session, slot))
                continue
            try:
                offers.append(session.draw(slot, path, rows[row], trees.node_id(session, slot)))
            except UnusableLogitsError:
                lost.add(session)
        trees.grow([offer for offer in offers if offer.session not in lost])
        return lost

    def _grow_ranked(
        self, computed: Sequence[_Computed], token_ids: Ints, confidences: Floats, kv: Ints
    ) -> set[DraftSession]:
        """Hangs levels of the best guesses below each node; returns sessions whose logits are unusable."""
        if not computed:
            return set()
        lost = {computed[place].session for place in np.flatnonzero(token_ids[0, :, 0] < 0).tolist()}
        # Nothing is hung below the other nodes of one that is lost, either.
        token_ids[:, [each.session in lost for each in computed]] = NONE
        starts = Calls(rows_of(each.session.row for each in computed), rows_of(each.slot for each in computed))
        self.scheduler.trees.grow_levels(starts, token_ids, confidences, kv)
        return lost

    def _output(self, report: DraftReport, started_s: float) -> DraftOutput:
        report.seconds = self._clock() - started_s
        report.num_sessions = self._num_reported = self.num_sessions
        report.kv_usage = self.pool.num_used / self.pool.num_blocks
        report.prefix_queries, report.prefix_hits = self.pool.take_counts()
        outgoing, broken = self.scheduler.take()
        sent = [message for messages in outgoing.values() for message in messages]
        report.num_nodes = sum(message.num_nodes for message in sent if isinstance(message, Drafts))
        return DraftOutput(to_verifiers=outgoing, broken_links=broken, report=report)


class _Computed(NamedTuple):
    """A node, or the root, whose children's logits a step has computed.

    Attributes:
        slot: Of the node, or ROOT.
        path: Tokens from below the root down to it.
        row: Of its logits.
    """

    session: DraftSession
    slot: int
    path: Sequence[int]
    row: int


def _ranks_of(computed: Sequence[_Computed]) -> Ranks:
    return Ranks(
        rows=np.array([each.row for each in computed], np.int64),
        positions=np.array([len(each.session.tokens) + len(each.path) for each in computed], np.int64),
        choices=choices_of([each.session.choice for each in computed]),
    )


def _row_of(each: Expansion) -> TreeRow:
    session = each.session
    position = each.position - session.first_position
    return TreeRow(session.pages, each.path[-1], position, each.kv)


def _parent_slot(each: Expansion) -> int:
    """Where states of the node's parent lie, which has been expanded."""
    pages = each.session.pages
    return each.kv[-2] if len(each.kv) > 1 else pages.slot(len(pages.tokens) - 1)
