"""The verifier's step as arithmetic: who has a place, which rows are computed, whether to wait, what drafters receive.

`plan(now)` says what the next step computes; `commit` adds what the target chose for one session, and `end_step`
what the step took. It runs no model and reads no clock.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.link import commit
from paceline.core.messages import StepCommit
from paceline.core.pages import BlockPool, SlotPool
from paceline.core.step_drafts import Choice, StepDrafts
from paceline.core.step_time import PromptRows
from paceline.core.target_events import (
    StepReport,
    TargetLimits,
    num_accepted_of,
)
from paceline.engine.admission import first_in_turn, gives_way, last_in_turn, prompt_rows
from paceline.engine.planned_step import Part, StepPlan
from paceline.engine.target_session import TargetSession
from paceline.forest import NO_GUESSES, Calls, Guesses, Ints, rows_of
from paceline.service.learned import learning

_ORDER = attrgetter("order")
# Tokens of the sessions that get places before one step, the last one's apart: to look for 100,000 among cached pages,
# and to write them to a drafter, takes 20 ms of the event loop, and the samples of one request may be 128.
MOST_ADMITTED_TOKENS = 65_536
NO_ROWS = rows_of(())


class Scheduler:
    """Continuous batching over sessions that share pages and steps; see the module docstring.

    Args:
        pool: Pages of committed KV.
        scratch: Slots for the KV of verified nodes.
        policy: Which nodes a step verifies.
        tier: The drafters, and the trees of all sessions.

    Attributes:
        report: Report of the running step.
        moves: Moves of this step's accepted nodes: scratch slots, and the slots of their positions.
        prompt_rows: How many rows of prompts a step may have.
        committed: Tokens, events and errors of sessions since the last output.
    """

    def __init__(
        self,
        *,
        pool: BlockPool,
        scratch: SlotPool,
        limits: TargetLimits,
        policy: Goodput,
        tier: DrafterTier,
    ) -> None:
        self.pool = pool
        self.tier = tier
        self.forest = tier.forest
        self.report = StepReport()
        self.moves: list[tuple[int, int]] = []
        self.prompt_rows = PromptRows()
        self.committed = StepCommit()
        self._scratch = scratch
        self._limits = limits
        self._policy = policy
        # By tenant, in their order; a tenant that waits for nothing is left out.
        self._waiting: dict[str, list[TargetSession]] = {}
        self._running: list[TargetSession] = []
        # Rows of these, and whether all decode; None: they have changed.
        self._running_rows: Ints | None = None
        self._all_decode: bool | None = None
        # By number: the id of one that is cancelled may come back before that is known.
        self._sessions: dict[int, TargetSession] = {}
        self._drafts = StepDrafts(policy, tier.forest)
        self._idle_since_s: float | None = None
        # Since when there has been the present step to do; None while there is nothing to decode.
        self._cycle_since_s: float | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions that wait or run."""
        return len(self._sessions)

    @property
    def running(self) -> Sequence[TargetSession]:
        """Sessions that have a place, in the order of their admission."""
        return self._running

    @property
    def has_work(self) -> bool:
        """True while sessions wait or run, or messages are left to send."""
        return bool(self._sessions) or not self.committed.is_empty or self.tier.has_work

    def holds(self, session: TargetSession) -> bool:
        """Whether a session still waits or runs."""
        return session.number in self._sessions

    def session(self, number: int) -> TargetSession | None:
        """The session of that number, unless it has ended."""
        return self._sessions.get(number)

    # Events

    def submit(self, session: TargetSession) -> None:
        """Adds a session; it waits for a place behind those of its tenant that come before it."""
        self._sessions[session.number] = session
        self._wait(session)
        self.tier.connect(session.link)

    def drop(self, session: TargetSession) -> None:
        """A session has ended, or its client has left."""
        del self._sessions[session.number]
        if self._policy.mode.rehearsing is not None:
            # No prompt of anybody is to find its pages.
            session.pages.forget()
        for source in self.forest.unverified_sources(session.tree.row):
            self.report.count("paceline:draft_nodes", source, "unverified")
        # Its row is another session's once it is closed.
        self.tier.part(session.link)
        session.close()
        if session in self._running:
            self._running.remove(session)
            self._running_rows = self._all_decode = None
        else:
            self._leave_queue(session)

    # Waiting

    def patience_s(self, now_s: float) -> float:
        """Seconds for which the next drafts are worth waiting for; 0: step now.

        No step waits for a drafter whose answer is overdue until it sends nodes again.
        """
        self._drafts.mark_silent(self._rows, now_s, self.report)
        rows = self._delayable()
        return self._drafts.worth_waiting(rows, self._drafts.waits(rows, now_s), idle_s=self._idle_s(now_s))

    def drafts_pay(self, draft_s: float, now_s: float) -> bool:
        """Whether a draft step of `draft_s` seconds, for all sessions, is worth the delay; the same objective."""
        return self._drafts.pays(self._delayable(), draft_s, idle_s=self._idle_s(now_s))

    def _idle_s(self, now_s: float) -> float:
        return 0.0 if self._idle_since_s is None else now_s - self._idle_since_s

    @property
    def _rows(self) -> Ints:
        if self._running_rows is None:
            self._running_rows = rows_of([session.tree.row for session in self._running])
        return self._running_rows

    def _delayable(self) -> Ints:
        """Rows of decoding sessions; none when something else waits for the next step, or no drafts are expected."""
        rows = self._rows
        if self.tier.has_work or self._waiting or not self._drafts.drafters_work(rows):
            return NO_ROWS
        if self._all_decode is None:
            self._all_decode = all(session.is_decoding for session in self._running)
        return rows if self._all_decode else NO_ROWS

    # Planning

    def plan(self, now_s: float) -> StepPlan:
        """Plans the next step, of all sessions that have rows to compute."""
        drafters_work = self._drafts.drafters_work(self._rows)
        self._admit(now_s)
        ready, joining = self._with_pages(self._running)
        guesses = self._plan_guesses(ready, joining, now_s)
        decoding = [
            Part(session, (length := len(session.tokens)) - 1, length, count, decodes=True)
            for session, count in zip(ready, guesses.counts.tolist(), strict=True)
        ]
        reading = self._plan_reading(joining, len(decoding) + len(guesses.tokens))
        # A session begins with rows of its prompt.
        for session in [part.session for part in reading if not part.session.announced]:
            self.committed.add_event(session.number, session.announce())
        return StepPlan(now_s, drafters_work, decoding, reading, guesses)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after one whose tokens nobody has read yet; None where it takes more than these tokens.

        Where such a token ends its session the row is wasted. Its pages are given back at once all the same: the next
        owner writes later than that row does.
        """
        alone = not self._waiting and not len(plan.guesses.tokens) and not self._may_guess()
        if not alone or not all(each.is_decoding and each.runs_ahead for each in self._running):
            return None
        sessions = [part.session for part in plan.decoding if not part.session.ends_next]
        if not sessions or not all(each.pages.reserve(each.committed_len + 1) for each in sessions):
            return None
        decoding = [Part(each, each.committed_len, each.committed_len + 1, 0, decodes=True) for each in sessions]
        guesses = NO_GUESSES._replace(counts=np.zeros(len(decoding), np.int32))
        return StepPlan(plan.started_s, False, decoding, [], guesses)

    def take_up(self, plan: StepPlan, now_s: float) -> bool:
        """Goes on with a step that was planned ahead; False: its sessions have all ended."""
        plan.decoding = plan.parts = [part for part in plan.decoding if self.holds(part.session)]
        if plan.decoding:
            # Modes and prices go on as in any step.
            self._drafts.choose(rows_of(part.session.tree.row for part in plan.decoding), NO_ROWS)
            self._drafts.describe(self.report)
            plan.started_s = now_s
        return bool(plan.decoding)

    def _may_guess(self) -> bool:
        """Whether a drafter, or a source inside the verifier, may come up with guesses."""
        at = self.forest.links.standing(self._rows, 1)
        return self._policy.guesses and bool((at.drafted | at.sourced).any())

    def _admit(self, now_s: float) -> None:
        """Gives places and pages; a tenant below its share takes them from prompts of one above."""
        num_tokens = 0
        while self._waiting and num_tokens < MOST_ADMITTED_TOKENS:
            held = Counter(session.tenant for session in self._running)
            session = first_in_turn((queue[0] for queue in self._waiting.values()), held)
            while len(self._running) >= self._limits.max_num_seqs or not session.admit(now_s):
                other = gives_way(self._running, held, session.tenant)
                if other is None:
                    return
                self._preempt(other)
                held[other.tenant] -= 1
            self._leave_queue(session)
            self._running.append(session)
            self._running_rows = self._all_decode = None
            num_tokens += session.committed_len

    def _with_pages(self, sessions: Sequence[TargetSession]) -> tuple[list[TargetSession], list[TargetSession]]:
        """Reserves pages for what decoding sessions have committed; returns these, and those whose prompts are read.

        Left out are those that have lost their pages to it.
        """
        decoding, joining = list[TargetSession](), list[TargetSession]()
        for session in sessions:
            (decoding if session.is_decoding else joining).append(session)
        lost = set[int]()
        for session in decoding:
            while session.number not in lost and not session.pages.reserve(len(session.tokens)):
                loser = last_in_turn(self._running, Counter(each.tenant for each in self._running))
                self._preempt(loser)
                lost.add(loser.number)
        if lost:
            decoding, joining = ([each for each in part if each.number not in lost] for part in (decoding, joining))
        return decoding, joining

    def _preempt(self, session: TargetSession) -> None:
        """Takes a session's pages; it will be computed anew when there is room."""
        self._running.remove(session)
        self._running_rows = self._all_decode = None
        session.pages.release()
        self._wait(session)
        self.report.count("vllm:num_preemptions")

    def _wait(self, session: TargetSession) -> None:
        insort(self._waiting.setdefault(session.tenant, []), session, key=_ORDER)

    def _leave_queue(self, session: TargetSession) -> None:
        queue = self._waiting[session.tenant]
        queue.remove(session)
        if not queue:
            del self._waiting[session.tenant]

    def _plan_guesses(
        self, decoding: Sequence[TargetSession], joining: Sequence[TargetSession], now_s: float
    ) -> Guesses:
        backlog = sum(session.pages.num_missing for session in joining)
        budget = self._limits.max_num_batched_tokens
        other_rows = min(backlog, self.prompt_rows.most(max(0, budget - len(decoding))))
        # Prefill gets a quarter of the rows when it needs them.
        share = max(0, (budget - min(backlog, budget // 4)) // max(1, len(decoding)) - 1)
        rows, joining_rows = self._rows, NO_ROWS
        if len(decoding) < len(self._running):
            rows, joining_rows = (rows_of([each.tree.row for each in part]) for part in (decoding, joining))
        choice = self._drafts.choose(rows, joining_rows, other_rows=other_rows, most_each=share)
        self._drafts.describe(self.report)
        if joining:
            self.tier.update([each.link for each in joining if not each.link.sent_len], now_s)
        return self._with_kv(decoding, choice)

    def _with_kv(self, sessions: Sequence[TargetSession], choice: Choice) -> Guesses:
        """Takes scratch slots for the chosen nodes, and pages of the positions that they may be moved to."""
        kv = self._scratch.take_many(len(choice.rows))
        self.forest.set_kv(Calls(choice.rows, choice.taken.slots), rows_of(kv))
        guesses = Guesses(choice.counts, *choice.taken[1:], rows_of(kv))
        short = [
            place
            for place, (session, deepest) in enumerate(zip(sessions, guesses.deepest, strict=True))
            if deepest and not session.pages.reserve(1 + deepest)
        ]
        for place in short:
            self._scratch.give_back(*guesses.of(place).kv.tolist())
            self.forest.drop_kv(sessions[place].tree.row)
        return guesses.without(short) if short else guesses

    def _plan_reading(self, sessions: Sequence[TargetSession], num_rows: int) -> list[Part]:
        """Chunks of prompts, while the step has room."""
        reading: list[Part] = []
        if not sessions:
            return reading
        room = max(0, self._limits.max_num_batched_tokens - num_rows)
        rows = prompt_rows(sessions, self.prompt_rows.most(room))
        for session in sessions:
            if count := rows[session.number]:
                start = session.pages.num_computed
                session.prefilled_to = start + count
                reading.append(Part(session, start, start + count, 0, decodes=False))
        self.report.num_prefill_rows = sum(part.num_rows for part in reading)
        return reading

    # Committing

    def commit(self, plan: StepPlan, parts: Sequence[Part], now_s: float) -> None:
        """Gives sessions of the step the committed tokens.

        Args:
            parts: Of the sessions, in the order of their tokens.
        """
        committed = self.committed
        links = [part.session.link for part in parts]
        done = commit(self.forest, links, committed.ends, committed.tokens, committed.chances)
        self.report.count_nodes(self.forest.sources, done.counts)
        self.tier.count_commits(links, committed.ends, done)
        self._scratch.give_back(*plan.guesses.kv.tolist())
        accepted, hits = num_accepted_of(done.accepted, committed.ends), done.hits.tolist()
        matched, moves, first = done.accepted.tolist(), done.moves.tolist(), 0
        columns = zip(parts, committed.offsets, matched, accepted, hits, strict=True)
        for part, offset, num_matched, num_accepted, hit in columns:
            session = part.session
            if num_matched:
                self.moves += session.pages.moved(moves[first : first + num_matched])
                first += num_matched
            session.pages.mark_computed(session.prompt_len + offset + num_matched)
            session.tally.count(part.num_guesses, num_accepted, len(parts), hit=hit)
            session.committed_s = now_s
            if session.first_token_s is None:
                session.first_token_s = now_s
            if session.finish is not None or session.logprobs:
                committed.add_event(session.number, session.take_event())
            if session.finish is not None:
                self.drop(session)
            if session.traced:
                counts = {"gamma": part.num_guesses, "num_accepted": num_accepted, "batch_size": len(parts)}
                step = {**counts, **self._traced_step(plan, now_s)}
                self.report.traced.append(session.round(**step) if part.decodes else session.start())
        # Sessions that decode come first.
        num_decoding = sum([part.decodes for part in parts])
        verified = [part.num_guesses for part in parts[:num_decoding]]
        self.report.count_rounds(verified, accepted[:num_decoding], hits[:num_decoding])
        self.tier.update([link for part, link in zip(parts, links, strict=True) if part.session.finish is None], now_s)

    def _traced_step(self, plan: StepPlan, now_s: float) -> dict[str, float]:
        """Trace fields that all rounds of a step share."""
        waited_s = 0.0 if self._cycle_since_s is None else plan.started_s - self._cycle_since_s
        return {
            "num_rows": plan.num_rows,
            "num_prompt_rows": plan.num_prefill_rows,
            "wait_s": max(0.0, waited_s),
            "step_s": now_s - plan.started_s,
        }

    def give_up(self, part: Part, *, request_at_fault: bool = False) -> None:
        """The step gave a session nothing to choose from; it ends.

        A page of its own may be at fault, or one from the cache, so what others compute from the same pages is not
        shared any more either. Pages are above doubt where the request itself leaves nothing.
        """
        doubtful: set[int] = set() if request_at_fault else set(part.session.pages.blocks)
        for each in self._running:
            if not doubtful.isdisjoint(each.pages.blocks):
                each.pages.forget()
        self.drop(part.session)

    def abandon(self, plan: StepPlan) -> None:
        """The step could not be computed: its sessions are planned for anew, and nothing is learned of it."""
        for part in plan.decoding:
            # Their slots are other nodes' soon.
            self.forest.drop_kv(part.session.tree.row)
        self._scratch.give_back(*plan.guesses.kv.tolist())
        plan.abandoned, self._cycle_since_s = True, None
        for part in plan.parts:
            part.session.prefilled_to = part.session.pages.num_computed

    def end_step(self, plan: StepPlan, now_s: float) -> None:
        """The step is over; the policy learns its time, and the cycle's: events and waiting cost time, too."""
        for session in [part.session for part in plan.reading if self.holds(part.session)]:
            if session.prefilled_to > session.pages.num_computed:
                session.pages.mark_computed(session.prefilled_to)
        if not plan.num_rows or plan.abandoned:
            return
        self._idle_since_s, self._all_decode = now_s, None
        seconds = now_s - plan.started_s
        self.report.seconds = seconds
        plain_s = self._policy.plain_s(plan.num_rows - plan.num_prefill_rows)
        self.prompt_rows.observe(rows=plan.num_prefill_rows, seconds=seconds, plain_s=plain_s)
        # A step in which a session failed shows nothing: its rows took time, and brought no token.
        if self._cycle_since_s is not None and 0 < len(self.report.gammas) == len(plan.decoding):
            with learning(self._policy.forget):
                self._policy.observe(
                    roots=len(plan.decoding),
                    guesses=sum(self.report.gammas),
                    tokens=len(self.report.gammas) + sum(self.report.accepted),
                    step_s=seconds,
                    cycle_s=now_s - self._cycle_since_s,
                    other_rows=plan.num_prefill_rows,
                )
        self._cycle_since_s = now_s if self._running else None

    def take_report(self, plan: StepPlan) -> StepReport:
        """Returns the step's report; the next step gets a new one."""
        report, self.report = self.report, StepReport()
        report.num_rows = plan.num_rows
        self.tier.report_commits(report)
        return report

    def describe(self, report: StepReport) -> StepReport:
        """Adds the present state to a report."""
        report.num_running = len(self._running)
        report.num_waiting = len(self._sessions) - len(self._running)
        report.count_pages(self.pool)
        self._drafts.show_lag(self._rows, report)
        return report

    def take_commit(self) -> StepCommit:
        """Returns what clients get now."""
        committed, self.committed = self.committed, StepCommit()
        return committed
