"""The planner's schedule is the engine's, step by step: the same arrivals and the same drafts, so the same plans.

The engine runs a real model, its steps take what the profile says, and what its drafter says is written down. Then the
planner's verifier gets the same arrivals, and the same drafts in tokens that say whether they are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.messages import CloseSession, Commit, Drafts, NodeGuess, OpenSession, SessionDrafts, ToDrafter
from paceline.core.pages import BLOCK_SIZE
from paceline.core.pairing import DrafterCandidate
from paceline.core.params import SamplingParams
from paceline.core.planned_step import StepPlan
from paceline.core.scheduled_session import ScheduledSession
from paceline.core.scheduler import Scheduler
from paceline.core.target_events import DraftsArrived, StepReport
from paceline.planning.events import Act, Events
from paceline.planning.verifier import Request, SimulatedVerifier
from paceline.simulated.guesses import RIGHT
from paceline.simulated.profile import DeviceFacts
from tests.support.engines import DRAFTER, EnginePair
from tests.unit.planning.facts import profile

# Odd figures, so that no two things happen at the same time by chance.
FACTS = DeviceFacts(
    name="large",
    rows=(1, 512),
    seconds=(0.01013, 0.01013 + 511 * 0.00021),
    kv_tokens=20 * BLOCK_SIZE,
    max_sessions=6,
    max_rows=48,
)
PROFILE = replace(profile(), target=FACTS)
DRAFT_S = 0.00237
# At 1 to 16 sessions, as a policy has learned it: plain steps at a rate of 1, and steps that draft at one of 2.
DRAFTING_WON = [each for at in range(5) for each in (float(at), 1.0, 2.0)]
# The drafter hangs for a while, and says what it has to say after that.
HANGS_FROM_S, HANGS_TO_S = 0.6, 0.7531
# A burst at the beginning, then one now and then; most of these have prompts of several steps.
ARRIVALS = [
    Request(number=number, at_s=at_s, num_prompt_tokens=prompt, num_output_tokens=output)
    for number, (at_s, prompt, output) in enumerate(
        (
            *((0.0, 20, 40), (0.0, 33, 12), (0.0, 7, 60), (0.0, 90, 25), (0.0, 5, 50), (0.0, 12, 5), (0.0, 60, 30)),
            *((0.1711, 100, 20), (0.3307, 9, 48), (0.3309, 130, 9), (1.6101, 15, 70), (1.9003, 110, 33)),
        )
    )
]


@dataclass(frozen=True)
class Planned:
    """A step: when, whether drafters work, the price, and `(session, start, stop, nodes)` of all that it computes."""

    at_s: float
    drafters_work: bool
    price: float
    decoding: tuple[tuple[str, int, int, int], ...]
    reading: tuple[tuple[str, int, int, int], ...]


@dataclass
class Schedule:
    """What a verifier planned, and what it told its drafter and when."""

    plans: list[Planned] = field(default_factory=list)
    told: list[tuple[object, ...]] = field(default_factory=list)

    def watch(self, scheduler: Scheduler[ScheduledSession], price: Goodput) -> None:
        """Writes down all that a scheduler plans from now on."""
        plan = scheduler.plan

        def watched(now_s: float) -> StepPlan[ScheduledSession]:
            planned = plan(now_s)
            if planned.num_rows:
                parts = [
                    tuple((each.session.session_id, each.start, each.stop, len(each.nodes)) for each in group)
                    for group in (planned.decoding, planned.reading)
                ]
                self.plans.append(Planned(now_s, planned.drafters_work, price.price, *parts))
            return planned

        scheduler.plan = watched  # type: ignore[method-assign]

    def tell(self, now_s: float, messages: Sequence[ToDrafter]) -> None:
        """Writes down what the drafter is told."""
        for each in messages:
            match each:
                case OpenSession():
                    said: tuple[object, ...] = (0, len(each.token_ids), each.price, each.room)
                case Commit():
                    said = (each.base_len, len(each.token_ids), each.price, each.room)
                case _:
                    assert isinstance(each, CloseSession)
                    said = ()
            self.told.append((now_s, type(each).__name__, each.session_id, *said))


class EngineAtWork:
    """The engines in simulated time, driven as `paceline.engine.bridge` drives them; a drafter that answers at once."""

    def __init__(self, pair: EnginePair, policy: Goodput) -> None:
        self.schedule = Schedule()
        self.drafts: list[tuple[float, list[Drafts]]] = []
        self.reports: list[StepReport] = []
        self.events = Events(0)
        self.num_waits = 0
        self._pair = pair
        self._inbox: list[Act] = []
        self._busy = False
        self._num_told = 0
        self._drafted_s = 0.0
        pair.clock.tick_s = 0.0
        self.schedule.watch(pair.target.scheduler, policy)

    def post(self, act: Act) -> None:
        """Something happens; a step under way goes on first."""
        self._inbox.append(act)
        if not self._busy:
            self._drive()

    def _drive(self) -> None:
        self._busy = False
        self._pair.clock.now_s = self.events.now_s
        inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        if not self._pair.target.has_work():
            return
        patience_s = self._pair.target.patience_s()
        self.num_waits += 1
        if patience_s > 0.0:
            number = self.num_waits
            self.events.after(patience_s, lambda: number == self.num_waits and not self._busy and self._drive())
            return
        self._busy = True
        early = self._pair.target.begin()
        if early is not None:
            self._pair.hear(early)
        self._draft()
        plan = self._pair.target._plan
        assert plan is not None
        self.events.after(FACTS.step_s(plan.num_rows, num_sessions=len(plan.parts)), self._end_step)

    def _end_step(self) -> None:
        self._pair.clock.now_s = self.events.now_s
        output = self._pair.target.step()
        self.reports.append(output.report)
        self._pair.hear(output)
        self._draft()
        self._drive()

    def _draft(self) -> None:
        """The drafter has heard what was said; a few steps of it, and their messages arrive one after the other."""
        told = self._pair.to_drafter[self._num_told :]
        self._num_told += len(told)
        self.schedule.tell(self.events.now_s, told)
        draft = self._pair.draft
        assert draft is not None
        hangs = HANGS_FROM_S <= self.events.now_s < HANGS_TO_S
        self._drafted_s = max(self._drafted_s, HANGS_TO_S if hangs else self.events.now_s)
        for _ in range(4):
            if told and draft.has_work():
                said = draft.step().to_verifiers.get(1, [])
                assert all(isinstance(each, Drafts) for each in said)
                self._drafted_s += DRAFT_S
                self.events.after(self._drafted_s - self.events.now_s, self._hear(said))

    def _hear(self, said: list[Drafts]) -> Act:
        def hear() -> None:
            now_s = self.events.now_s
            self.drafts.append((now_s, said))
            arrived = DraftsArrived(address=DRAFTER, messages=said, arrived_s=now_s)
            self.post(lambda: self._pair.target.handle(arrived))

        return hear


class Listener:
    """A drafter of the planner's verifier that hears, and says what was written down."""

    address = DRAFTER

    def __init__(self, events: Events) -> None:
        self.schedule = Schedule()
        self._events = events

    def known(self) -> DrafterCandidate:
        """What the verifier knows of it."""
        return DrafterCandidate(address=DRAFTER)

    def count(self, change: int) -> None:
        """It need not know how many sessions it has."""

    def send(self, messages: Sequence[ToDrafter], verifier: SimulatedVerifier) -> None:
        """The verifier says something."""
        self.schedule.tell(self._events.now_s, messages)


def engine_at_work(tiny_pair: tuple[Path, Path]) -> tuple[EngineAtWork, EnginePair]:
    """Runs all arrivals through a real engine."""
    policy = Goodput(FACTS.starting_cost(), max_nodes=PROFILE.most_nodes)
    policy.mode.resume(DRAFTING_WON)
    pair = EnginePair(
        *tiny_pair,
        policy=policy,
        num_blocks=FACTS.kv_tokens // BLOCK_SIZE,
        max_num_seqs=FACTS.max_sessions,
        max_num_batched_tokens=FACTS.max_rows,
    )
    work = EngineAtWork(pair, policy)
    rng = np.random.default_rng(5)
    for each in ARRIVALS:
        name, prompt = str(each.number), rng.integers(0, 256, each.num_prompt_tokens).tolist()
        sampling = SamplingParams(max_tokens=each.num_output_tokens, temperature=0.0, ignore_eos=True)

        def submit(name=name, prompt=prompt, sampling=sampling) -> None:
            work.post(lambda: pair.submit(name, prompt, sampling, salt=name))

        work.events.after(each.at_s, submit)
    work.events.run()
    return work, pair


def in_plain_words(drafts: list[tuple[float, list[Drafts]]], pair: EnginePair) -> list[tuple[float, list[Drafts]]]:
    """The same drafts of a text that is `RIGHT` over and over: a guess is that where it is the target's own token."""
    positions: dict[tuple[int, int], int] = {}

    def translated(said: SessionDrafts) -> SessionDrafts:
        # Sessions have numbers in the order in which they arrive, from 1 on.
        asked = ARRIVALS[said.number - 1]
        chosen = pair.sessions[str(asked.number)].token_ids
        nodes: list[NodeGuess] = []
        for node in said.nodes:
            above = positions[said.number, node.parent_id] if node.parent_id else said.base_len - 1
            positions[said.number, node.node_id] = above + 1
            place = above + 1 - asked.num_prompt_tokens
            right = place < len(chosen) and node.token_id == chosen[place]
            nodes.append(node._replace(token_id=RIGHT if right else 1 + node.token_id))
        return said._replace(nodes=nodes)

    return [(at_s, [Drafts.of(*map(translated, message)) for message in said]) for at_s, said in drafts]


def planner_at_work(drafts: list[tuple[float, list[Drafts]]]) -> Schedule:
    """Runs all arrivals, and the drafts, through the planner's verifier."""
    events = Events(0)
    listener = Listener(events)
    process = SimulatedVerifier(PROFILE, events, colocated=False, drafters=[listener], on_end=lambda _: None)
    listener.schedule.watch(process.scheduler, process.policy)
    process.policy.mode.resume(DRAFTING_WON)
    for each in ARRIVALS:
        events.after(each.at_s, lambda each=each: process.submit(replace(each, pieces=[])))
    for at_s, said in drafts:
        events.after(at_s, lambda said=said: process.receive(DRAFTER, said))
    events.run()
    return listener.schedule


def test_the_planner_plans_what_the_engine_plans_and_says_what_it_says(tiny_pair: tuple[Path, Path]) -> None:
    work, pair = engine_at_work(tiny_pair)
    engine = work.schedule
    planner = planner_at_work(in_plain_words(work.drafts, pair))
    for number, (ours, theirs) in enumerate(zip_longest(engine.plans, planner.plans)):
        assert ours == theirs, f"step {number}"
    assert engine.told == planner.told
    # All that a scheduler does has happened on the way.
    assert all(len(pair.sessions[str(each.number)].token_ids) == each.num_output_tokens for each in ARRIVALS)
    assert sum(report.num_preempted for report in work.reports) > 0
    assert sum(sum(report.accepted) for report in work.reports) > 0
    assert sum(report.num_silenced for report in work.reports) > 0
    assert work.num_waits > len(work.reports), "some steps waited for drafts"
    assert any(each.decoding and each.reading for each in engine.plans)
    assert {each.drafters_work for each in engine.plans} == {False, True}
